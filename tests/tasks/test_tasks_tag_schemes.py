"""Entities are those that seqeval's own scheme finds, and IOB1 is told from other schemes and converted."""

from __future__ import annotations

import itertools
import random
from operator import itemgetter
from pathlib import Path

import pytest
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import BILOU, IOB1, IOB2, IOBES, Entities

from mlmclm.errors import UserError
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.families.token_classification import as_iobes, entities_of, is_iob1, to_iob2
from mlmclm.tasks.load import load_task

Spans = list[tuple[int, int, str]]


def drawn(draw: random.Random) -> tuple[int, Spans]:
    """The length of a sentence, and its entities, often side by side."""
    spans, place = [], 0
    for _ in range(draw.randint(0, 5)):
        place += draw.choice([0, 0, 1, 2])
        end = place + draw.randint(1, 3)
        spans.append((place, end, draw.choice(["PER", "LOC"])))
        place = end
    return place + draw.randint(1, 2), spans


def tagged(length: int, spans: Spans, *, iob1: bool) -> list[str]:
    """Tags by the definitions of the schemes."""
    tags = ["O"] * length
    for start, end, kind in spans:
        tags[start:end] = [f"I-{kind}"] * (end - start)
        beside = any(other[1] == start and other[2] == kind for other in spans)
        if not iob1 or beside:
            tags[start] = f"B-{kind}"
    return tags


def entities(tags: list[str], scheme: type) -> list[tuple[str, int, int]]:
    return [(each.tag, each.start, each.end) for each in Entities([tags], scheme).entities[0]]


@pytest.mark.parametrize("seed", range(3))
def test_the_entities_of_converted_tags_are_those_that_seqeval_finds_in_iob1(seed: int) -> None:
    draw = random.Random(seed)
    sentences = [drawn(draw) for _ in range(30)]
    before = [tagged(*each, iob1=True) for each in sentences]
    after = [tagged(*each, iob1=False) for each in sentences]
    assert is_iob1(before) and not is_iob1(after)
    for old, new in zip(before, after, strict=True):
        assert to_iob2(old) == new and to_iob2(new) == new
        assert entities(old, IOB1) == entities(new, IOB2)


@pytest.mark.parametrize(
    ("tags", "iob1"),
    [
        (["I-PER", "O"], True),
        (["I-PER", "B-PER", "I-PER"], True),
        (["I-PER", "I-LOC"], True),
        (["O", "O"], False),
        ([], False),
        (["B-PER", "I-PER"], False),
        (["I-PER", "O", "B-PER"], False),  # neither: a slip in IOB2
        (["I-PER", "B-LOC"], False),
    ],
)
def test_only_tags_that_are_iob1_throughout_count_as_iob1(tags: list[str], iob1: bool) -> None:
    assert is_iob1([["O"], tags]) == iob1


def in_letters(length: int, spans: Spans, letters: str, form: str) -> list[str]:
    """Tags with a letter for a beginning, an inside, an end, and a single word."""
    tags = ["O"] * length
    for start, end, kind in spans:
        own = [letters[1]] * (end - start)
        own[0], own[-1] = letters[0], letters[2]
        if end - start == 1:
            own = [letters[3]]
        tags[start:end] = [form.format(letter, kind) for letter in own]
    return tags


@pytest.mark.parametrize(
    ("letters", "form", "scheme"),
    [
        ("BIES", "{}-{}", IOBES),
        ("BILU", "{}-{}", BILOU),
        ("BIIB", "{}-{}", IOB2),
        ("BMES", "{}-{}", None),
        ("BMEW", "{}-{}", None),
        ("BIES", "{}_{}", None),
        ("BILU", "{1}-{0}", None),
        ("BIIB", "{1}-{0}", None),
    ],
)
def test_entities_are_those_of_seqeval_s_scheme(letters: str, form: str, scheme: type | None) -> None:
    draw = random.Random(0)
    sentences = [drawn(draw) for _ in range(20)]
    tagged_so = [in_letters(*each, letters, form) for each in sentences]
    names = sorted({tag for tags in tagged_so for tag in tags})
    read = dict(zip(names, as_iobes(names) or (), strict=True))
    for (_, spans), tags in zip(sentences, tagged_so, strict=True):
        found = [
            (kind, start, end + 1)
            for kind, start, end in sorted(entities_of(tuple(read[tag] for tag in tags)), key=itemgetter(1))
        ]
        assert found == [(kind, start, end) for start, end, kind in spans]
        assert scheme is None or entities(tags, scheme) == found


def test_types_without_letters_are_entities_of_neighbours_and_tags_without_o_are_units() -> None:
    draw = random.Random(0)
    tags = draw.choices(["O", "person-actor", "location", "B.C."], k=60)
    runs, place = [], 0
    for kind, group in itertools.groupby(tags):
        end = place + len(list(group))
        runs += [(kind, place, end - 1)] if kind != "O" else []
        place = end
    names = ("O", "person-actor", "location", "B.C.")
    read = dict(zip(names, as_iobes(names) or (), strict=True))
    assert entities_of(tuple(read[tag] for tag in tags)) == set(runs)
    speech = ("NOUN", "VERB", "X", "-LRB-", "PRP$", "S", "B")
    read = dict(zip(speech, as_iobes(speech) or (), strict=True))
    words = draw.choices(speech, k=30)
    assert entities_of(tuple(read[tag] for tag in words)) == {(tag, n, n) for n, tag in enumerate(words)}
    assert as_iobes(("O", "B-PER", "I-PER", "MISC")) is None and as_iobes(("O", "B", "I")) == ("O", "B", "I")


def test_a_mix_of_schemes_and_numbers_without_names_are_refused_unless_words_alone_count(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    declaration = {
        "name": "own", "family": "token-classification", "title": "Own", "source": "local", "folder": "own", "licence": "-", "citation": "-",
        "splits": {"train": "train", "validation_fraction": 0.2, "test": "test"},
    }  # fmt: skip
    for tags, message in (
        (("B-PER", "MISC"), r"The tags are O, B-PER, MISC\. Give tags of one scheme"),
        ("17", "numbers without names"),
    ):
        text = "\n\n".join(f"Anna {tags[0]}\nleft {'O' if tags != '17' else 0}\nP{n} {tags[1]}" for n in range(20))
        for split in ("train", "test"):
            (tmp_path / "own" / f"{split}.conll").write_text(text)
        with pytest.raises(UserError, match=message):
            load_task(Task.model_validate(declaration | {"metric": "f1"}), store=tmp_path, data_root=tmp_path)
        data = load_task(Task.model_validate(declaration | {"metric": "accuracy"}), store=tmp_path, data_root=tmp_path)
        assert len(data.label_names) == 3


def test_entities_of_any_iobes_tags_are_seqevals() -> None:
    draw = random.Random(0)
    tags = ["O", *(f"{letter}{kind}" for letter in "BIES" for kind in ("", "-a", "-b", "-a-b"))]
    for _ in range(5_000):
        sentence = draw.choices(tags, k=draw.randrange(12))
        found = {
            (kind.replace("_", ""), *place) for kind, *place in get_entities(sentence)
        }  # `_` is its name for no type
        assert entities_of(tuple(sentence)) == found
