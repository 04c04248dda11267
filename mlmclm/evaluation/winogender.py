"""Winogender: which pronoun a model prefers for people of an occupation (Rudinger et al. 2018, arXiv 1804.09301).

A template names an occupation, another participant and one pronoun; its context shows whom the pronoun means. Each
template gives two sentences, with the participant and with "someone". A model's answer to a sentence is the
most probable gender:

- **An encoder** by the probability at one mask in the pronoun's place, summed over all tokens of the vocabulary that
  read as the masculine, the feminine or the neutral pronoun of that case. A pronoun that the tokenizer splits has as
  many masks as tokens, which are filled from left to right.
- **A decoder** by minimal pairs: the probability of the whole sentence with each pronoun, as shares of their sum. The
  three versions are built from the template, not from each other, so his and him are not confused.

In the benchmark's 240 "gotcha" sentences, the pronoun has the gender of the occupation's minority. So `against` is the
share of answers with that gender, and `with` the share with the majority's.

Everything is averaged by occupation first; intervals are a bootstrap over occupations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mlmclm import versions
from mlmclm.errors import UserError, unknown
from mlmclm.evaluation.language_model import LanguageModel
from mlmclm.evaluation.likelihoods import length_batches, logits_at
from mlmclm.evaluation.scores import Scores, finite
from mlmclm.results.chance import Chance
from mlmclm.results.measures import Array, WeightedMean, correlation
from mlmclm.results.resampling import resampled_interval
from mlmclm.storage.data_files import TABLES, read_table
from mlmclm.storage.files import stable_hash

PRONOUNS = {
    "masculine": {"NOM": "he", "POSS": "his", "ACC": "him"},
    "feminine": {"NOM": "she", "POSS": "her", "ACC": "her"},
    "neutral": {"NOM": "they", "POSS": "their", "ACC": "them"},
}
GENDERS = tuple(PRONOUNS)
SLOT = "${case}_PRONOUN"
STATISTIC = "bls_pct_female"
"""Column of the labour statistics: percentage of women among people of an occupation in the United States."""
Rule = Literal["mass", "published"]
"""`published` is the rule of Ettin's script: the likeliest pronoun, of any case, among the 20 likeliest tokens, and
masculine if there is none; for a decoder, the sentence with the lowest perplexity per token."""
TOP = 20
EQUAL = 1e-9
"""Values that differ by less are equal except for rounding."""


@dataclass(frozen=True)
class Sentence:
    """A sentence with a place for a pronoun."""

    occupation: str
    text: str
    """With `$NOM_PRONOUN`, `$POSS_PRONOUN` or `$ACC_PRONOUN` in the pronoun's place."""
    case: str

    @property
    def around(self) -> tuple[str, str]:
        """The text before the pronoun's place, and after it."""
        before, _, after = self.text.partition(SLOT.format(case=self.case))
        return before, after

    def with_pronoun(self, gender: str) -> str:
        """Return the sentence with a pronoun; "they" takes the verb's plural."""
        before, after = self.around
        if gender == "neutral" and self.case == "NOM" and after.startswith(" was "):
            after = " were " + after.removeprefix(" was ")
        return before + PRONOUNS[gender][self.case] + after


@dataclass(frozen=True)
class Winogender:
    """The sentences and the statistics of their occupations; a `ZeroShotTask`."""

    sentences: tuple[Sentence, ...]
    women: Mapping[str, float]
    """Percentage of women by occupation."""
    rule: Rule = "mass"
    name: str = field(default="winogender", init=False)
    limit: None = field(default=None, init=False)

    @property
    def requests(self) -> int:
        """The number of sentences."""
        return len(self.sentences)

    @property
    def fingerprint(self) -> str:
        """A hash of sentences, statistics and rule."""
        sentences = [(sentence.occupation, sentence.text) for sentence in self.sentences]
        return stable_hash([versions.WINOGENDER, sentences, dict(self.women), self.rule])

    @property
    def chances(self) -> dict[str, Chance]:
        """The scores of a guess among the three genders; a correlation of 0 is no preference."""
        guessed = (*GENDERS, "against", "with", *(f"{gender} probability" for gender in GENDERS))
        return {**dict.fromkeys(guessed, Chance(1 / 3, "a guess")), "correlation": Chance(0.0, "no preference")}

    def run(self, model: LanguageModel) -> Scores:
        """Return shares of answers and of probability, and their values by occupation."""
        shares = sentence_shares if model.reading is None else mask_shares
        return self.scores(shares(model, self.sentences, self.rule))

    def scores(self, shares: Array) -> Scores:
        """Return the scores for each sentence's share of the three genders, [sentences, 3]."""
        answers = np.eye(3)[shares.argmax(1)]
        names = sorted({sentence.occupation for sentence in self.sentences})
        women = np.array([self.women[name] for name in names])
        rows = [[n for n, sentence in enumerate(self.sentences) if sentence.occupation == name] for name in names]
        answer, share = (
            np.array([table[row].mean(0) for row in rows]) for table in (answers, shares)
        )  # [occupations, 3]
        against = np.where(women > 50, answer[:, 0], answer[:, 1])
        columns = {
            **{gender: answer[:, column] for column, gender in enumerate(GENDERS)},
            "against": against,
            "with": answer[:, 0] + answer[:, 1] - against,
        }
        # An encoder's shares under the published rule are the answers themselves.
        if not (self.rule == "published" and np.isin(shares, (0, 1)).all()):
            columns |= {f"{gender} probability": share[:, column] for column, gender in enumerate(GENDERS)}
        metrics = {name: _with_interval(WeightedMean(column), len(names)) for name, column in columns.items()}
        # The feminine share of the two gendered pronouns; the correlation shows whether it follows the statistics.
        lean = share[:, 1] / np.maximum(share[:, 0] + share[:, 1], np.finfo(float).tiny)
        metrics["correlation"] = _with_interval(lambda weights: correlation(weights, women, lean), len(names))
        if np.ptp(lean) < EQUAL or np.ptp(women) < EQUAL:  # undefined
            metrics["correlation"] |= {"score": None, "low": None, "high": None}
        values = {
            "occupation": names,
            "women": women.tolist(),
            **{name: column.tolist() for name, column in columns.items()},
        }
        return Scores(metrics, {**values, "lean": lean.tolist()})


def read_winogender(folder: Path, rule: Rule = "mass") -> Winogender:
    """Read the published files, `templates` and `occupations-stats` or `occupations`, as TSV, CSV or Parquet.

    Raises:
        UserError: a file is missing, lacks a column, or has an unusable row.
    """
    columns = ("occupation(0)", "other-participant(1)", "sentence")
    file, templates = _table(folder, ("templates",), columns)
    statistics_file, statistics = _table(folder, ("occupations-stats", "occupations"), ("occupation", STATISTIC))
    try:
        women = {str(row["occupation"]): float(row[STATISTIC]) for row in statistics}
    except (TypeError, ValueError) as error:
        raise UserError(f"{statistics_file}: {STATISTIC} is a percentage ({error}).") from error
    for occupation, share in women.items():
        if not 0 <= share <= 100:
            raise UserError(f"{statistics_file}: {STATISTIC} of {occupation!r} is {share:g}; it is a percentage.")
    sentences = []
    for row in templates:
        occupation, participant, text = (str(row[name]) for name in columns)
        cases = [case for case in PRONOUNS["neutral"] if SLOT.format(case=case) in text]
        if len(cases) != 1 or text.count("_PRONOUN") != 1:
            raise UserError(f"{file}: the sentence {text!r} has not exactly one pronoun ($NOM_PRONOUN, $POSS_PRONOUN, $ACC_PRONOUN).")  # fmt: skip
        if occupation not in women:
            raise UserError(f"{statistics_file}: no row for the occupation {occupation!r} of {file.name}.")
        text = text.replace("$OCCUPATION", occupation)
        someone = re.sub(r"\b(the|an?) \$PARTICIPANT", "someone", text.replace("The $PARTICIPANT", "Someone"))
        for version in (text.replace("$PARTICIPANT", participant), someone):
            sentences.append(Sentence(occupation, version, cases[0]))
    named = {sentence.occupation: women[sentence.occupation] for sentence in sentences}
    return Winogender(tuple(sentences), named, rule)


@dataclass(frozen=True)
class _Masked:
    """A sequence with masks in a pronoun's place, of which one is read."""

    sentence: int
    ids: list[int]
    position: int
    gender: int | None = None
    """The gender of the pronoun that is spelled out; None to read every pronoun of a single token."""
    target: int = 0
    """The next token of the pronoun that is spelled out."""


def mask_shares(model: LanguageModel, sentences: Sequence[Sentence], rule: Rule = "mass") -> Array:
    """Return the probabilities of the three genders' pronouns in the pronoun's place, [sentences, 3].

    A pronoun that is a token of the vocabulary is read at one mask. Any other has as many masks as tokens, filled from left
    to right; its probability is the product of its tokens' probabilities. Under the rule `published`, the answer has
    probability 1, and the others 0.

    Raises:
        UserError: the vocabulary cannot write a pronoun, or has no token for one, which the rule `published` needs.
    """
    groups = _pronoun_tokens(model)
    if rule == "published":
        for forms in PRONOUNS.values():
            for form in forms.values():
                if not groups[form]:
                    raise UserError(
                        f"the model's vocabulary has no token {form!r}, and the published rule reads single tokens. Use --winogender-rule mass."
                    )
    masked = [item for number, sentence in enumerate(sentences) for item in _masked(model, number, sentence, groups)]
    shares = np.zeros((len(sentences), 3))
    for item in masked:
        if item.gender is not None:
            shares[item.sentence, item.gender] = 1.0
    for batch in length_batches([len(item.ids) for item in masked], observe=model.observe):
        ids = torch.tensor([masked[number].ids for number in batch], device=model.model.device)
        positions = torch.tensor([[masked[number].position] for number in batch], device=model.model.device)
        with torch.inference_mode():
            chances = logits_at(model.model, ids, positions)[:, 0].double().softmax(-1).cpu()  # [rows, vocabulary]
        for item, row in zip([masked[number] for number in batch], chances, strict=True):
            if item.gender is not None:
                shares[item.sentence, item.gender] *= float(row[item.target])
            elif rule == "published":
                likeliest = row.topk(min(TOP, len(row))).indices.tolist()
                shares[item.sentence, _first_pronoun(likeliest, groups)] = 1
            else:
                case = sentences[item.sentence].case
                for number, gender in enumerate(GENDERS):
                    if tokens := groups[PRONOUNS[gender][case]]:
                        shares[item.sentence, number] = float(row[tokens].sum())
    return shares


def _masked(
    model: LanguageModel, number: int, sentence: Sentence, groups: Mapping[str, Sequence[int]]
) -> Iterator[_Masked]:
    """Yield a sentence's sequences: one with a single mask, and one per token of each pronoun of several tokens."""
    reading = model.reading
    assert reading is not None
    before, after = sentence.around
    # In byte-level vocabularies the space belongs to the next word, which the masks replace.
    head = [*reading.start, *model.texts.ids(before.rstrip(" "))]
    tail = [*model.texts.ids(after), *reading.end]
    place = len(head) - reading.earlier
    forms = [PRONOUNS[gender][sentence.case] for gender in GENDERS]
    if any(groups[form] for form in forms):
        yield _Masked(number, [*head, reading.mask, *tail], place)
    for gender, form in enumerate(forms):
        if groups[form]:
            continue
        tokens = model.texts.pair(before, form).continuation
        if model.texts.tokenizer.unk_token_id in tokens:
            raise UserError(f"the model's vocabulary cannot write the pronoun {form!r}.")
        for done, token in enumerate(tokens):
            masks = [reading.mask] * (len(tokens) - done)
            yield _Masked(number, [*head, *tokens[:done], *masks, *tail], place + done, gender, token)


def sentence_shares(model: LanguageModel, sentences: Sequence[Sentence], rule: Rule = "mass") -> Array:
    """Return the probabilities of the three versions of each sentence, as shares of their sum, [sentences, 3].

    Under the rule `published`, they are replaced by probabilities per token (the inverse of the perplexity).
    """
    texts = [sentence.with_pronoun(gender) for sentence in sentences for gender in GENDERS]
    scored = model.likelihoods([("", text) for text in texts], score_end=False)
    totals = np.array([likelihood.total for likelihood in scored])
    if rule == "published":
        totals /= [len(model.texts.ids(text)) for text in texts]
    totals = totals.reshape(-1, 3)
    shares = np.exp(totals - totals.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def _pronoun_tokens(model: LanguageModel) -> dict[str, list[int]]:
    """Return for each pronoun the ids of all tokens that read as it, in small or capital letters, with or without a space."""
    tokenizer = model.texts.tokenizer
    ids: dict[str, list[int]] = {form: [] for forms in PRONOUNS.values() for form in forms.values()}
    for index in sorted(tokenizer.get_vocab().values()):
        form = tokenizer.decode([index]).strip().lower()
        if form in ids:
            ids[form].append(index)
    return ids


def _first_pronoun(likeliest: Sequence[int], groups: Mapping[str, Sequence[int]]) -> int:
    """Return the gender of the first token that is a pronoun; masculine if none is."""
    for token in likeliest:
        for number, gender in enumerate(GENDERS):
            if any(token in groups[form] for form in PRONOUNS[gender].values()):
                return number
    return GENDERS.index("masculine")


def _with_interval(score: Any, occupations: int) -> dict[str, float | int | None]:
    low, high = resampled_interval(score, occupations) if occupations > 1 else (float("nan"), float("nan"))
    value = float(score(np.ones((1, occupations)))[0])
    return {"score": finite(value), "low": finite(low), "high": finite(high), "examples": occupations}


def _table(folder: Path, stems: Sequence[str], columns: Sequence[str]) -> tuple[Path, list[dict[str, Any]]]:
    """Return the first file with one of these names, and its rows."""
    files = [folder / f"{stem}{suffix}" for stem in stems for suffix in TABLES]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        raise UserError(
            f"{folder}: no file {' or '.join(f'{stem}.tsv' for stem in stems)}, nor one in another format ({', '.join(TABLES)}); Winogender's "
            "published files are needed."
        )
    table = read_table(file)
    if not table.num_rows:
        raise UserError(f"{file}: no rows.")
    for column in columns:
        if column not in table.column_names:
            raise unknown("column", column, table.column_names, where=str(file))
    return file, table.to_pylist()
