"""Scores of answers to questions: the official scores of SQuAD and SQuAD v2, and the study's F1 over token positions."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from mlmclm.tasks.prepared_task import Examples


def normalise_answer(text: str) -> str:
    """Apply SQuAD's official normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the normalised prediction equals any normalised reference, else 0."""
    return float(any(normalise_answer(prediction) == normalise_answer(reference) for reference in references))


def answer_f1(prediction: str, references: Sequence[str]) -> float:
    """Return the highest F1 between bags of normalised words over all references (SQuAD v1.1: no overlap gives 0)."""
    return max(
        _f1(normalise_answer(prediction).split(), normalise_answer(reference).split()) for reference in references
    )


def _f1(prediction: list[str], reference: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(reference)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def study_answer_f1(prediction: tuple[int, int] | None, answer: tuple[int, int] | None) -> float:
    """Compute the study's F1 (arXiv 2507.00994) over sets of token positions, against the first answer only.

    Each argument is a set's first and last token within the passage; None is the empty set. Two empty sets have F1 1, as
    in SQuAD v2; the study does not define this case.
    """
    if prediction is None or answer is None:
        return float(prediction is answer)
    common = min(prediction[1], answer[1]) - max(prediction[0], answer[0]) + 1
    return 2 * max(0, common) / sum(last - first + 1 for first, last in (prediction, answer))


def graded(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Examples:
    """Compute SQuAD's official F1 and exact match of each question."""
    pairs = list(zip(predictions, references, strict=True))
    return {
        "f1": np.array([answer_f1(*pair) for pair in pairs]),
        "exact_match": np.array([exact_match(*pair) for pair in pairs]),
    }


def graded_with_unanswerable(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Examples:
    """Compute SQuAD v2's official F1 and exact match of each question.

    Columns with the prefix `has_answer_` cover only the questions with an answer, those with `no_answer_` only the others.
    They are left out if there are no such questions.

    A question without an answer has the empty text as its only reference. If the prediction or the reference is empty
    after normalisation, F1 is 1 if both are empty, else 0.
    """
    accepted = [list(filter(normalise_answer, answers)) or [""] for answers in references]
    scores = graded(predictions, accepted)
    # Two empty texts have no word in common, but they match exactly.
    scores["f1"] = np.maximum(scores["f1"], scores["exact_match"])
    answered = np.array([bool(answers) for answers in references])
    parts = {"has_answer": answered, "no_answer": ~answered}
    return scores | {
        f"{name}_{score}": np.where(part, values, np.nan)
        for name, part in parts.items()
        if part.any()
        for score, values in scores.items()
    }


def constant_answers(references: Sequence[Sequence[str]]) -> list[str]:
    """Return texts that score well as the answer to every question: the commonest answer, and the best single word.

    Both are normalised. As the answer to every question, no text has a higher exact match than the commonest answer, and
    no word has a higher F1 than the best word. Ties go to the first in the alphabet. Questions without an answer don't
    count.
    """
    exact: Counter[str] = Counter()
    f1: dict[str, float] = {}
    for answers in references:
        texts = {normalise_answer(answer) for answer in answers} - {""}
        exact.update(texts)
        best: dict[str, float] = {}
        for words in map(str.split, texts):
            for word in words:
                best[word] = max(best.get(word, 0.0), 2 / (1 + len(words)))
        for word, score in best.items():
            f1[word] = f1.get(word, 0.0) + score
    sums: list[Mapping[str, float]] = [exact, f1]
    chosen = (min(total, key=lambda text: (-total[text], text)) for total in sums if total)
    return list(dict.fromkeys(chosen))
