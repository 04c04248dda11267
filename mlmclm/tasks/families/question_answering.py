"""Extractive question answering: find the span of a passage that answers a question.

Scored by SQuAD's metrics and by the study's. A passage that does not fit is split into windows that overlap by `stride`
tokens. In a window without the answer, both targets are the closing token. The prediction is the best span over all
windows.

In a task with unanswerable questions (SQuAD v2), the prediction is empty if, in every window, the closing token's start
and end logits sum to more than the score of the best span: BERT's rule with a threshold of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from mlmclm.errors import UserError
from mlmclm.results.measures import Array
from mlmclm.tasks.answers import constant_answers, exact_match, graded, graded_with_unanswerable, study_answer_f1
from mlmclm.tasks.columns import Columns, TaskData
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.family import Family, limited_splits
from mlmclm.tasks.prepared_task import Examples, Linear, Lists, PreparedTask, means, numeric, objects
from mlmclm.tasks.settings import TaskSettings
from mlmclm.tasks.texts import ending, int_lists, token_ids, token_spans

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

    from mlmclm.backends.packing import Packing

ANSWERS = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int64()))])
_NUMBER, _NUMBERS = pa.int32(), pa.list_(pa.int32())
WINDOWS = pa.schema(
    [
        ("input_ids", _NUMBERS),
        ("example", _NUMBER),  # number of the example in the split
        ("passage", _NUMBER),  # index in the sequence where the passage begins
        ("begin", _NUMBER),  # position in the passage of the window's first token
        ("first", _NUMBERS),  # first character of each passage token
        ("last", _NUMBERS),  # position after the last character of each
        ("start", _NUMBER),  # targets, as indices in the sequence
        ("end", _NUMBER),
    ]
)
"""Columns of a split's table: one row per window."""
GUESSES, MOST_ROUNDS = 20_000, 20
"""Number of random answers for the chance level, over all test questions, and the maximum per question."""
QUESTION = "Question: {question}\nContext:"
"""The study's prompt template; the passage follows after a space."""


def passage_windows(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Split a passage of `tokens` tokens into windows (start, end), at most `room` long and overlapping by `stride`."""
    if tokens <= room:
        return [(0, tokens)]
    step = max(1, room - stride)
    starts = range(0, tokens - room + step, step)
    return [(start, min(start + room, tokens)) for start in starts]


class AnsweringTask(PreparedTask):
    """A task of question answering, trained with cross-entropy of the start and of the end over the passage's tokens."""

    @cached_property
    def _examples(self) -> dict[str, tuple[list[str], list[list[str]], list[tuple[int, int] | None]]]:
        """Contexts, reference answers, and the first answer's first and last token, of validation and test."""
        examples = {}
        for split in ("validation", "test"):
            table = self.table(f"{split}_examples")
            positions = [tuple(row) or None for row in table["positions"].to_pylist()]
            examples[split] = (table["context"].to_pylist(), table["answers"].to_pylist(), positions)
        return examples

    def head(self, hidden: int, linear: Linear) -> nn.Module:
        """Return a Linear that gives each token a start and an end logit."""
        from torch import nn

        return nn.Sequential(linear(hidden, 2))

    @staticmethod
    def _logits(head: nn.Module, hidden: Tensor, packing: Packing, passage: Array) -> Tensor:
        """Compute start and end logits by position, fp32 [2, S, longest].

        The question and positions beyond the closing token are masked with -inf.
        """
        import torch

        flat = head(hidden[: packing.tokens]).float()  # [tokens, 2]
        position = np.arange(int(packing.lengths.max()))
        real = position < packing.lengths[:, None]
        index = torch.from_numpy(np.where(real, packing.starts[:, None] + position, 0)).to(flat.device)
        allowed = torch.from_numpy(real & (position >= passage[:, None])).to(flat.device)
        return flat.t()[:, index].masked_fill(~allowed, float("-inf"))

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        import torch
        import torch.nn.functional as functional

        start, end = self._logits(head, hidden, packing, targets["passage"])
        start_target, end_target = (
            torch.from_numpy(targets[name]).to(start.device).long() for name in ("start", "end")
        )
        return (functional.cross_entropy(start, start_target) + functional.cross_entropy(end, end_target)) / 2

    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        """Find each window's best span, float64 [3]: score, first token, last token.

        Tokens count from the window's first passage token. In a task with unanswerable questions, the score of the
        empty answer follows, [4].
        """
        import torch
        import torch.nn.functional as functional

        passage = self.columns[split]["passage"][rows]
        start, end = self._logits(head, hidden, packing, passage)  # [S, longest]
        closing = torch.from_numpy(packing.lengths - 1).to(start.device).unsqueeze(1)
        none = (start.gather(1, closing) + end.gather(1, closing)).squeeze(1)  # [S]
        # The closing token stands for "no answer": it must not be part of a span.
        start, end = start.scatter(1, closing, float("-inf")), end.scatter(1, closing, float("-inf"))
        reach = self.settings.max_answer_tokens
        # For each start, look only at the ends within reach, not at all longest x longest pairs.
        ends = functional.pad(end, (0, reach - 1), value=float("-inf")).unfold(1, reach, 1)  # [S, longest, reach]
        best_end, span = ends.max(dim=2)
        score, first = (start + best_end).max(dim=1)  # [S]
        last = first + span.gather(1, first.unsqueeze(1)).squeeze(1)
        begins = torch.from_numpy(passage).to(start.device)
        columns = [score, first - begins, last - begins, *([none] if self.unanswerable else [])]
        # float64 holds both the fp32 scores and the token numbers exactly.
        spans = torch.stack([column.double() for column in columns], dim=1)
        return list(spans.cpu().numpy())

    def spans(self, split: str, predictions: Sequence[Array]) -> list[tuple[int, int, int] | None]:
        """Return each example's best span over its windows; None for the empty answer.

        A span is (window, first token, last token); tokens count from the window's first passage token.
        """
        table = self.columns[split]
        examples = len(self._examples[split][0])
        best: list[tuple[float, tuple[int, int, int] | None]] = [(float("-inf"), None)] * examples
        no_answer = [float("inf")] * examples  # lowest over windows: the answer must be missing from every one of them
        for window, (score, first, last, *none) in enumerate(predictions):
            example = int(table["example"][window])
            no_answer[example] = min([no_answer[example], *map(float, none)])
            if score > best[example][0]:
                best[example] = (float(score), (window, int(first), int(last)))
        if not self.unanswerable:
            return [span for _, span in best]
        return [None if none > score else span for (score, span), none in zip(best, no_answer, strict=True)]

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        table, (contexts, references, answers) = self.columns[split], self._examples[split]
        texts: list[str] = []
        positions: list[tuple[int, int] | None] = []  # first and last token within the whole passage
        for context, span in zip(contexts, self.spans(split, predictions), strict=True):
            if span is None:
                texts.append("")
                positions.append(None)
            else:
                window, first, last = span
                texts.append(context[table["first"][window][first] : table["last"][window][last]])
                begin = int(table["begin"][window])
                positions.append((begin + first, begin + last))
        return self._graded(texts, references) | {
            "study.f1": np.array([study_answer_f1(*pair) for pair in zip(positions, answers, strict=True)]),
            "id": objects(self.table(f"{split}_examples")["id"].to_pylist()),
            "answer": objects(texts),
        }

    def _graded(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Examples:
        """Return the scores that compare texts. The study's F1 compares positions, so it is 0 here; `examples` replaces it."""
        grade = graded_with_unanswerable if self.unanswerable else graded
        return grade(texts, references) | {"study.f1": np.zeros(len(texts))}

    def blind(self) -> Iterator[tuple[str, Examples]]:
        windows, references = self.columns["test"]["first"].lengths.tolist(), self._examples["test"][1]
        if self.unanswerable:
            yield "never an answer", self._answered([(0.0, 0, 0)] * len(windows), none=1.0)
        # As many tokens of the passage as an answer may have. Of windows with equal scores, `spans` keeps the first.
        reach = self.settings.max_answer_tokens
        yield "the start of the passage", self._answered([(1.0, 0, min(tokens, reach) - 1) for tokens in windows])
        for text in constant_answers(references):
            yield f"always {text!r}", self._graded([text] * len(references), references)
        draw, rounds = np.random.default_rng(0), max(1, min(MOST_ROUNDS, GUESSES // len(references)))
        guesses = [self._answered(self._guesses(draw)) for _ in range(rounds)]
        numbers = {name: np.mean([guess[name] for guess in guesses], axis=0) for name in numeric(guesses[0])}
        yield "words from anywhere", numbers

    def _answered(self, spans: Sequence[tuple[float, int, int]], none: float = 0.0) -> Examples:
        """Return the test examples for a prediction in each window; `none` scores the empty answer, if that is allowed."""
        return self.examples("test", [np.array([*span, *([none] if self.unanswerable else [])]) for span in spans])

    def _guesses(self, draw: np.random.Generator) -> list[tuple[float, int, int]]:
        """Answer each test question by one to four words from anywhere in its passage; return a prediction for each window."""
        table, (contexts, *_) = self.columns["test"], self._examples["test"]
        starts = np.flatnonzero(np.diff(table["example"], prepend=-1))  # first window of each example
        chosen = starts + draw.integers(np.diff(np.append(starts, len(table["example"]))))
        predictions = [(-1.0, 0, 0)] * len(table["example"])
        for window in chosen.tolist():
            context, first = contexts[table["example"][window]], table["first"][window]
            words = [place for place, at in enumerate(first) if at == 0 or context[at - 1].isspace()] or [0]
            word = int(draw.integers(len(words)))
            after = word + int(draw.integers(1, 5))
            last = words[after] - 1 if after < len(words) else len(first) - 1
            predictions[window] = (1.0, words[word], last)
        return predictions


class QuestionAnswering(Family):
    """Scored by SQuAD's exact match and F1, and by the study's F1."""

    name = "question-answering"
    title = "Question answering"
    prepared = AnsweringTask
    columns: ClassVar = {"id": pa.string(), "question": pa.string(), "context": pa.string(), "answers": ANSWERS}
    metrics: ClassVar = {"f1": "F1", "exact_match": "exact match", "study.f1": "study's F1"}
    study_metric = "study.f1"
    unanswerable = True
    gold_words = "answers"
    overlong_words = "in windows"
    shown: ClassVar = {"id": "id", "prediction": "answer"}

    @classmethod
    def column(cls, columns: Columns, name: str, names: tuple[str, ...]) -> pa.Array:
        """Return one canonical column.

        The fields of `answers` may come in any order. If it holds texts only, each answer starts at its first
        occurrence in the context.
        """
        if name != "answers":
            return super().column(columns, name, names)
        column = columns.plain(name).combine_chunks()
        kind = column.type
        if pa.types.is_list(kind) and pa.types.is_string(kind.value_type):
            contexts = columns.typed("context", pa.string()).to_pylist()
            answers = [
                {"text": texts, "answer_start": [(context or "").find(text or "") for text in texts or ()]}
                for context, texts in zip(contexts, column.to_pylist(), strict=True)
            ]
            return pa.array(answers, ANSWERS)
        if not pa.types.is_struct(kind) or {"text", "answer_start"} - {field.name for field in kind}:
            raise UserError(
                f"{columns.where}: the column {columns.task.column(name)!r} must hold {{text, answer_start}}, it holds {kind}."
            )
        parts = [column.field(field.name).cast(field.type) for field in ANSWERS]
        return pa.StructArray.from_arrays(parts, fields=list(ANSWERS))

    @classmethod
    def check(cls, task: Task, where: str, table: pa.Table, names: tuple[str, ...]) -> None:
        columns = (table[name].to_pylist() for name in ("id", "context", "answers"))
        for row, (name, context, answers) in enumerate(zip(*columns, strict=True)):
            place = f"{where}: row {row} (id {name})"
            texts, starts = answers["text"] or [], answers["answer_start"] or []
            if not context.strip():  # without a span to choose, no score would be finite
                raise UserError(f"{place}: the context is empty.")
            if len(texts) != len(starts):
                raise UserError(f"{place}: {len(texts)} answer texts for {len(starts)} positions.")
            if not texts and not task.unanswerable:
                raise UserError(
                    f"{place}: there is no answer. A task with unanswerable questions says 'unanswerable: true' in its "
                    "declaration."
                )
            for text, start in zip(texts, starts, strict=True):
                if not text or context[max(start, 0) : max(start, 0) + len(text)] != text or start < 0:
                    position = context.find(text) if text else -1
                    hint = f"it is at {position}" if position >= 0 else "it isn't in the context at all"
                    raise UserError(
                        f"{place}: the answer {text[:60]!r} is not at character {start} of the context; {hint}."
                    )

    @classmethod
    def check_settings(cls, task: str, settings: TaskSettings) -> None:
        """Raise UserError unless `stride` is less than `max_length`: each window must begin after the one before."""
        if settings.stride >= settings.max_length:
            raise UserError(
                f"task {task}: stride {settings.stride} must be less than max_length {settings.max_length}; give the task a smaller "
                f"one, such as per_task: {{{task}: {{stride: {settings.max_length // 4}}}}}."
            )

    @classmethod
    def label_counts(cls, table: pa.Table, names: tuple[str, ...]) -> dict[str, float]:
        """Count the answered and the unanswerable questions."""
        answered = sum(bool(row["text"]) for row in table["answers"].to_pylist())
        return {"answered": answered, "unanswerable": table.num_rows - answered}

    @classmethod
    def show(cls, row: dict[str, Any], names: tuple[str, ...], text: Callable[[list[int]], str]) -> dict[str, Any]:
        ids = row["input_ids"]
        none = row["start"] == len(ids) - 1  # the target is the closing token
        return {"text": text(ids), "answer": None if none else text(ids[row["start"] : row["end"] + 1]).strip()}

    @classmethod
    def regained(cls, data: TaskData, encoded: Mapping[str, pa.Table], settings: TaskSettings) -> dict[str, Array]:
        """Return whether the text of each answered question's target tokens is an exact match."""
        by_split = {}
        for split, table in limited_splits(data, settings).items():
            right = []
            for row, example in zip(encoded[split].to_pylist(), table.to_pylist(), strict=True):
                texts, none = example["answers"]["text"], row["start"] == len(row["input_ids"]) - 1
                if texts:
                    first, last = (row[name] - row["passage"] for name in ("start", "end"))
                    text = "" if none else example["context"][row["first"][first] : row["last"][last]]
                    right.append(exact_match(text, texts))
            by_split[split] = np.array(right, dtype=bool)
        return by_split

    @classmethod
    def overlong(cls, table: pa.Table, column: str, settings: TaskSettings) -> Array:
        """Return which examples need several windows, bool [rows]; a question is first cut to half of `max_length`."""
        questions = table["passage"].to_numpy()
        passages = Lists.of(table, column).lengths - questions - 1
        room = settings.max_length - np.minimum(questions, settings.max_length // 2) - 1
        pairs = zip(passages.tolist(), room.tolist(), strict=True)
        return np.array([len(passage_windows(passage, space, settings.stride)) > 1 for passage, space in pairs])

    @classmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        cls.check_settings(data.task.name, settings)
        tables = {}
        for split, table in limited_splits(data, settings).items():
            tables[split], positions = cls._windows(table, tokenizer, settings)
            if split != "train":
                texts = [row["text"] or [] for row in table["answers"].to_pylist()]
                answers = pa.array(texts, pa.list_(pa.string()))
                tables[f"{split}_examples"] = pa.table(
                    {
                        "id": table["id"].combine_chunks(),
                        "context": table["context"].combine_chunks(),
                        "answers": answers,
                        "positions": int_lists(positions),
                    }
                )
        return tables

    @staticmethod
    def _windows(
        table: pa.Table, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings
    ) -> tuple[pa.Table, list[list[int]]]:
        """Tokenise the examples into windows.

        Returns:
            A table of `WINDOWS`, and for each example the first and last token of its first answer within the passage
            (an empty list without an answer).
        """
        end = ending(tokenizer)
        contexts, answers_of = table["context"].to_pylist(), table["answers"].to_pylist()
        questions = token_ids(
            tokenizer, [QUESTION.format(question=text.strip()) for text in table["question"].to_pylist()]
        )
        passages = token_spans(tokenizer, [" " + text for text in contexts])
        rows, positions = [], []
        examples = zip(contexts, answers_of, questions, *passages, strict=True)
        for example, (context, answers, question, ids, offsets) in enumerate(examples):
            question = question[: settings.max_length // 2]
            spans = np.array(offsets, dtype=np.int32).reshape(-1, 2)
            # Character offsets in the passage itself: one less, for the space put before it.
            first = np.maximum(spans[:, 0] - 1, 0)
            last = np.maximum(spans[:, 1] - 1, 0)
            # The token " word" starts at its space, which is not part of an answer.
            first += np.array(
                [start < stop and context[start].isspace() for start, stop in zip(first, last, strict=True)], bool
            )
            inside = np.empty(0, dtype=np.int64)  # tokens that overlap the first answer, if there is one
            if answers["text"]:
                answer_start = answers["answer_start"][0]
                inside = np.flatnonzero((last > answer_start) & (first < answer_start + len(answers["text"][0])))
            positions.append([int(inside[0]), int(inside[-1])] if len(inside) else [])
            for begin, stop in passage_windows(len(ids), settings.max_length - len(question) - 1, settings.stride):
                closing = len(question) + stop - begin
                target = (closing, closing)
                # A window that holds only part of the answer counts as one without it.
                if len(inside) and begin <= inside[0] and inside[-1] < stop:
                    target = (len(question) + int(inside[0]) - begin, len(question) + int(inside[-1]) - begin)
                sequence = [*question, *ids[begin:stop], end]
                rows.append((sequence, example, len(question), begin, first[begin:stop], last[begin:stop], *target))
        columns = zip(zip(*rows, strict=True), WINDOWS, strict=True)
        return pa.table([pa.array(column, kind.type) for column, kind in columns], WINDOWS), positions

    @classmethod
    def scores(cls, examples: Examples, classes: int) -> dict[str, float]:
        return means(examples)
