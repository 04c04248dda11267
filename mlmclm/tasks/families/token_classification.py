"""Token classification: tag each word of a sentence. Scored by whole entities, and by the study's F1 over words.

How tags are read as entities depends on their scheme:

- IOB2, IOBES and BILOU (also BMES and BMEWO): a letter before or after the type gives a word's position in its entity.
- IO, as in Few-NERD: types alone, and O. Neighbouring words of one type are an entity.
- Parts of speech and the like: tags alone, without O. Each word is a unit.
- IOB1 (Ramshaw and Marcus, 1995), as in CoNLL-2003's original files, is converted to IOB2. An entity begins with I-, and
  with B- only directly after another entity of its type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError, clipped
from mlmclm.progress import say_once
from mlmclm.results.measures import Array, Measure, WeightedMean, ratio
from mlmclm.results.metrics import metric_parts
from mlmclm.tasks.columns import Columns, TaskData, check_in_range
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.family import Family, limited_splits
from mlmclm.tasks.prepared_task import Batch, Examples, Linear, PreparedTask, mean_of, objects
from mlmclm.tasks.settings import TaskSettings
from mlmclm.tasks.texts import ending, int_lists, token_spans

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

    from mlmclm.backends.packing import Packing

NO_WORD = -1
"""Word number of a token that belongs to no word."""
IGNORED = -100
"""Label of a token that the loss leaves out."""
_PLACE = re.compile(r"([BIESLUMW])(?:[-_](.+))?")
_PLACE_LAST = re.compile(r"(?P<type>.+)[-_]([BIESLUMW])")
_LETTERS = {"L": "E", "U": "S", "M": "I", "W": "S"}
"""Letters of other schemes -> the letters of IOBES for the same position in an entity."""


def as_iobes(names: Sequence[str]) -> tuple[str, ...] | None:
    """Return tags with the letters of IOBES, which seqeval reads, in the same order; None for a mix of tags with and without letters."""
    others = [name for name in names if name != "O"]
    if all(map(_PLACE.fullmatch, others)):
        return tuple(_iobes(*match.groups()) if (match := _PLACE.fullmatch(name)) else name for name in names)
    if all(map(_PLACE_LAST.fullmatch, others)):
        return tuple(_iobes(match[2], match[1]) if (match := _PLACE_LAST.fullmatch(name)) else name for name in names)
    if any(re.match("[BIESLU]-.", name) for name in others):
        return None
    letter = "I" if "O" in names else "S"
    return tuple(name if name == "O" else f"{letter}-{name}" for name in names)


def _iobes(letter: str, kind: str | None) -> str:
    letter = _LETTERS.get(letter, letter)
    return letter if kind is None else f"{letter}-{kind}"


def is_iob1(sentences: Iterable[Sequence[str]]) -> bool:
    """Return whether tags are IOB1: an entity begins with I-, and none begins with B- where IOB1 has I-."""
    begun = False
    for tags in sentences:
        for before, tag in _pairs(tags):
            if tag[:2] == "B-" and before[2:] != tag[2:]:
                return False
            begun = begun or _begins(before, tag)
    return begun


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Return a sentence's tags with B- at the beginning of each entity."""
    return [f"B-{tag[2:]}" if _begins(before, tag) else tag for before, tag in _pairs(tags)]


def _pairs(tags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return each tag after the one before it, which is O at the start of a sentence."""
    return zip(["O", *tags], tags, strict=False)


def _begins(before: str, tag: str) -> bool:
    """Return whether a tag with I- begins an entity."""
    return tag[:2] == "I-" and before[2:] != tag[2:]


def words_of_tokens(words: list[str], offsets: Sequence[tuple[int, int]]) -> Array:
    """Return the number of the word that each token of `" ".join(words)` belongs to, int32 [tokens].

    The last character within a token's `offsets` decides. A token that is only a space gets `NO_WORD`.
    """
    lengths = np.array([len(word) for word in words])
    ends = np.cumsum(lengths + 1) - 1  # character after each word
    spans = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    # The last character and not the first: many tokenizers attach the space before a word to its first token.
    last = np.maximum(spans[:, 1] - 1, spans[:, 0])
    word = np.searchsorted(ends, last, side="right")
    inside = word < len(words)
    inside[inside] &= last[inside] >= (ends - lengths)[word[inside]]
    return np.where(inside, word, NO_WORD).astype(np.int32)


def study_f1(true: Sequence[Array], predicted: Sequence[Array], tags: int) -> Array:
    """Compute the study's F1 (arXiv 2507.00994), float64 [sentences]: the macro average over a sentence's tags, with O.

    A sentence without words has NaN. The split's score is the mean over sentences.

    The average is over the tags that occur among the sentence's gold or predicted tags (numbers below `tags`). If the whole
    tag set counted, the published scores could not exceed 90 %.
    """
    sentence = np.repeat(np.arange(len(true)), [len(row) for row in true])
    # Number the (sentence, tag) pairs, so that one bincount gives the counts of every sentence.
    place_true = sentence * tags + np.concatenate(true).astype(np.int64)
    place_predicted = sentence * tags + np.concatenate(predicted).astype(np.int64)
    size = len(true) * tags
    both = np.bincount(place_true, minlength=size) + np.bincount(place_predicted, minlength=size)
    right = np.bincount(place_true[place_true == place_predicted], minlength=size)
    f1 = (2 * right / both.clip(1)).reshape(-1, tags)
    present = (both > 0).reshape(-1, tags).sum(axis=1)
    return np.divide(f1.sum(axis=1), present, out=np.full(len(true), np.nan), where=present > 0)


class TaggingTask(PreparedTask):
    """A task of token classification, trained with cross-entropy over tagged sub-tokens."""

    def batch(self, rows: Array) -> Batch:
        ids, words, tags = (self.columns["train"][name] for name in ("input_ids", "words", "tags"))
        labels = [self._labels(words[row], tags[row]) for row in rows]
        return Batch([ids[row] for row in rows], {"labels": np.concatenate(labels)})

    def _labels(self, words: Array, tags: Array) -> Array:
        """Return the tag that each token carries, or `IGNORED`: int64 [tokens]."""
        labels = np.where(words == NO_WORD, IGNORED, tags[words]).astype(np.int64)
        if self.settings.label_sub_tokens == "first":
            labels[1:][words[1:] == words[:-1]] = IGNORED
        return labels

    def head(self, hidden: int, linear: Linear) -> nn.Module:
        """Return dropout followed by a Linear, applied to each token."""
        from torch import nn

        return nn.Sequential(nn.Dropout(self.settings.head_dropout), linear(hidden, len(self.label_names)))

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        import torch
        import torch.nn.functional as functional

        logits = head(hidden[: packing.tokens]).float()  # [tokens, tags]
        labels = torch.from_numpy(targets["labels"]).to(logits.device)
        total = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        # Not reduction="mean": it gives NaN for a batch without a labelled token.
        return total / max(1, int((targets["labels"] != IGNORED).sum()))

    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        logits = head(hidden[: packing.tokens]).float().cpu().numpy()
        words, tags = (self.columns[split][name] for name in ("words", "tags"))
        counts = tags.lengths[rows]
        begins = np.cumsum(counts) - counts
        in_sentence = np.concatenate([words[row] for row in rows])  # [tokens], the number of the word in its sentence
        owners = np.where(in_sentence == NO_WORD, NO_WORD, in_sentence + np.repeat(begins, packing.lengths))
        return np.split(self._vote(logits, owners, int(counts.sum())), begins[1:])

    def _vote(self, logits: Array, words: Array, count: int) -> Array:
        """Predict the tag of each word by majority vote of its sub-tokens, or by its first sub-token: float32 [words].

        A tie goes to the tag with the higher mean probability. A word that was truncated away gets O, or the first tag
        if there is no O.

        Args:
            words: int [tokens], the word of each token, numbered across all sentences; `NO_WORD` at the end of each
                sentence.
            count: number of words.
        """
        if not np.isfinite(logits).all():
            return np.full(count, np.nan, dtype=np.float32)
        tagged = words != NO_WORD
        if self.settings.label_sub_tokens == "first":
            tagged[1:] &= words[1:] != words[:-1]
        owners, tagged_logits = words[tagged], logits[tagged]
        probability = np.exp(tagged_logits - tagged_logits.max(axis=1, keepdims=True))
        probability /= probability.sum(axis=1, keepdims=True)
        ballot = np.zeros((count, logits.shape[1]))
        # np.add.at and not `+=`, which would count a word's repeated index only once.
        np.add.at(ballot, (owners, tagged_logits.argmax(axis=1)), 1.0)
        sub_tokens = np.bincount(owners, minlength=count).clip(1)
        # The mean probability, halved: less than one vote in all, so it only breaks ties.
        np.add.at(ballot, owners, 0.5 * probability / sub_tokens[owners, None])
        # Decides only for words without a token in the sequence, whose ballots are empty.
        names = self.label_names
        ballot[:, names.index("O") if "O" in names else 0] += 1e-9
        return ballot.argmax(axis=1).astype(np.float32)

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        """Count each sentence's words, correctly tagged words and entities (seqeval's gold, predicted and correct).

        The columns also hold each sentence's study F1, and its gold and predicted tags.
        """
        gold = list(self.columns[split]["tags"])
        # A mix of schemes is only accepted if the task's metric doesn't use entities.
        names = as_iobes(self.label_names) or self.label_names
        pairs = list(zip(gold, predictions, strict=True))
        entities = [[entities_of(tuple(names[int(tag)] for tag in tags)) for tags in pair] for pair in pairs]
        smallest = np.min_scalar_type(len(names))
        return {
            "words": np.array([len(true) for true in gold]),
            "words_correct": np.array([np.count_nonzero(true == predicted) for true, predicted in pairs]),
            "entities_gold": np.array([len(true) for true, _ in entities]),
            "entities_predicted": np.array([len(predicted) for _, predicted in entities]),
            "entities_correct": np.array([len(true & predicted) for true, predicted in entities]),
            "study.f1": study_f1(gold, predictions, len(names)),
            "gold_tags": objects([row.astype(smallest) for row in gold]),
            "predicted_tags": objects([row.astype(smallest) for row in predictions]),
        }

    def blind(self) -> Iterator[tuple[str, Examples]]:
        lengths = self.columns["test"]["tags"].lengths
        for number, name in enumerate(self.label_names):
            yield f"always {name}", self.examples("test", [np.full(length, number, np.float32) for length in lengths])


@lru_cache(maxsize=10_000)  # for `blind`, which asks for the same sentences once for each tag
def entities_of(tags: tuple[str, ...]) -> frozenset[tuple[str, int, int]]:
    """Return (type, first word, last word) of each entity in a sentence of IOBES tags, as seqeval's `get_entities` does."""
    entities, first, before, kind_before = set(), 0, "O", ""
    for place, tag in enumerate((*tags, "O")):
        letter, kind = tag[0], tag[1:].split("-", maxsplit=1)[-1]
        if letter in "BSO" or before in "OES" or kind != kind_before:
            if before != "O":
                entities.add((kind_before, first, place - 1))
            first = place
        before, kind_before = letter, kind
    return frozenset(entities)


class TokenClassification(Family):
    """Scored by seqeval's entity-level precision, recall and F1 (micro-averaged), word accuracy, and the study's F1."""

    name = "token-classification"
    title = "Token classification"
    prepared = TaggingTask
    columns: ClassVar = {"tokens": pa.list_(pa.string()), "tags": pa.list_(pa.int64())}
    labels = "tags"
    metrics: ClassVar = {
        "f1": "F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy", "study.f1": "study's F1",
    }  # fmt: skip
    study_metric = "study.f1"
    gold_columns = ("words", "entities_gold")
    gold_words = "tagged words"
    shown: ClassVar = {"gold": "gold_tags", "prediction": "predicted_tags"}

    @classmethod
    def label_names(cls, columns: Columns) -> tuple[str, ...]:
        names = super().label_names(columns)
        beginnings = [f"B-{name[2:]}" for name in names if name.startswith("I-")]
        missing = [name for name in dict.fromkeys(beginnings) if name not in names]
        if not missing or not cls._are_iob1(columns.numbered("tags", cls.columns["tags"], names), names):
            return names
        if columns.task.label_names:
            raise UserError(
                f"{columns.where}: the tags are IOB1, where an entity begins with I-. They are converted to IOB2, for which label_names "
                f"lacks {', '.join(missing)}. Add {'it' if len(missing) == 1 else 'them'}."
            )
        if columns.carried("tags"):
            return (*names, *missing)  # numbers in the data are indices into the source's names
        # In the order that `Columns.label_names` gives to names in the data.
        return tuple(sorted((*names, *missing), key=lambda name: (name != "O", name)))

    @classmethod
    def converted(cls, task: Task, names: tuple[str, ...], train: pa.Table, *others: pa.Table) -> tuple[pa.Table, ...]:
        """Convert tags that are IOB1 in the training table to IOB2, in all tables; IOB2 tags among them stay as they are."""
        splits = (train, *others)
        if not cls._are_iob1(train["tags"], names):
            return splits
        say_once(f"task {task.name}: the tags are IOB1, where an entity begins with I-; they are converted to IOB2")
        number = {tag: index for index, tag in enumerate(names)}

        def of(table: pa.Table) -> pa.Table:
            sentences = ([names[tag] for tag in tags] for tags in table["tags"].to_pylist())
            tags = pa.array([[number[tag] for tag in to_iob2(sentence)] for sentence in sentences], cls.columns["tags"])
            return table.set_column(table.column_names.index("tags"), "tags", tags)

        return tuple(map(of, splits))

    @staticmethod
    def _are_iob1(tags: pa.Array | pa.ChunkedArray, names: tuple[str, ...]) -> bool:
        """Return whether numbered tags are IOB1. Tags without any B- are IO, which doesn't mark the beginning of an entity."""
        letters = {name[0] for name in names if name[1:2] == "-"}
        if "B" not in letters or letters - {"B", "I"}:
            return False
        rows = tags.to_pylist()
        if any(row is None or any(tag is None or not 0 <= tag < len(names) for tag in row) for row in rows):
            return False  # `check` refuses it
        if not any(names[tag].startswith("B-") for row in rows for tag in row):
            return False
        return is_iob1([names[tag] for tag in row] for row in rows)

    @classmethod
    def check(cls, task: Task, where: str, table: pa.Table, names: tuple[str, ...]) -> None:
        tokens, tags = table["tokens"].combine_chunks(), table["tags"].combine_chunks()
        counts, tagged = (
            pa.compute.list_value_length(lists).to_numpy(zero_copy_only=False) for lists in (tokens, tags)
        )
        if (counts != tagged).any():
            row = int((counts != tagged).argmax())
            raise UserError(f"{where}: row {row}: {int(tagged[row])} tags for {int(counts[row])} tokens.")
        if (counts == 0).any():
            raise UserError(f"{where}: row {int((counts == 0).argmax())}: there are no tokens.")
        if tokens.flatten().null_count or tags.flatten().null_count:
            raise UserError(f"{where}: a token or tag is null.")
        several = [words for words in tokens.slice(0, 1000).to_pylist() if len(words) > 1]
        if len(several) >= 10 and all(len(set(words)) == 1 for words in several):
            raise UserError(
                f"{where}: each sentence repeats one word, such as {several[0][0]!r}. Name the column of the words, such as column_4 of CoNLL-2012."
            )
        check_in_range(where, "tag", tags.flatten().to_numpy(), np.repeat(np.arange(len(counts)), counts), names)
        if not {"f1", "precision", "recall"} & set(metric_parts(task.metric)):
            return
        if all(name.isdecimal() for name in names):
            raise UserError(
                f"{where}: the tags are numbers without names, which entities need. Give label_names, or metric: accuracy."
            )
        if as_iobes(names) is None:
            raise UserError(
                f"{where}: entities need tags that all begin with a letter such as B- or I-, or that all have none (except O). The tags are "
                f"{clipped(', '.join(names))}. Give tags of one scheme, or metric: accuracy."
            )

    @classmethod
    def show(cls, row: dict[str, Any], names: tuple[str, ...], text: Callable[[list[int]], str]) -> dict[str, Any]:
        tokens = [(text([token]).strip(), word) for token, word in zip(row["input_ids"], row["words"], strict=True)]
        tags = [(token, names[row["tags"][word]]) for token, word in tokens if word != NO_WORD]
        return {"text": text(row["input_ids"]), "tags": tags}

    @classmethod
    def regained(cls, data: TaskData, encoded: Mapping[str, pa.Table], settings: TaskSettings) -> dict[str, Array]:
        """Return whether each word has a token, without which it has no tag."""
        return {
            split: np.concatenate(
                [
                    np.isin(np.arange(len(row["tags"])), row["words"])
                    for row in encoded[split].select(["words", "tags"]).to_pylist()
                ]
            )
            for split in limited_splits(data, settings)
        }

    @classmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        end = ending(tokenizer)
        tables = {}
        for split, table in limited_splits(data, settings).items():
            sentences = table["tokens"].to_pylist()
            encoded = token_spans(tokenizer, [" ".join(words) for words in sentences])
            ids, owners = [], []
            for words, row, offsets in zip(sentences, *encoded, strict=True):
                count = settings.max_length - 1
                ids.append([*row[:count], end])
                owners.append(np.append(words_of_tokens(words, offsets)[:count], np.int32(NO_WORD)))
            tables[split] = pa.table(
                {"input_ids": int_lists(ids), "words": int_lists(owners), "tags": int_lists(table["tags"].to_pylist())}
            )
        return tables

    @classmethod
    def scores(cls, examples: Examples, classes: int) -> dict[str, float]:
        words, right, gold, predicted, both = (
            int(examples[name].sum())
            for name in ("words", "words_correct", "entities_gold", "entities_predicted", "entities_correct")
        )
        precision, recall = both / max(1, predicted), both / max(1, gold)
        return {
            "f1": 2 * precision * recall / (precision + recall) if both else 0.0,
            "precision": precision,
            "recall": recall,
            "accuracy": right / words,
            "study.f1": mean_of(examples["study.f1"]),
        }

    @classmethod
    def measures(cls, columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
        gold, predicted, both = (columns[f"entities_{name}"] for name in ("gold", "predicted", "correct"))
        return {
            "f1": ratio(2.0 * both, 1.0 * gold + predicted),
            "precision": ratio(both, predicted),
            "recall": ratio(both, gold),
            "accuracy": ratio(columns["words_correct"], columns["words"]),
            "study.f1": WeightedMean(columns["study.f1"]),
        }
