"""IOB1 is told from other schemes, and its conversion keeps all entities, as seqeval reads both."""

from __future__ import annotations

import random

import pytest
from seqeval.scheme import IOB1, IOB2, Entities

from mlmclm.tasks.tag_schemes import is_iob1, to_iob2

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


def entities(tags: list[str], scheme: type[IOB1] | type[IOB2]) -> list[tuple[str, int, int]]:
    return [(each.tag, each.start, each.end) for each in Entities([tags], scheme).entities[0]]


@pytest.mark.parametrize("seed", range(30))
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
