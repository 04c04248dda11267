"""Mixes: shares against a count one by one, and what each source gives against its own order."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mlmclm.corpora.blocks import Blocks, Shard
from mlmclm.corpora.mixed_blocks import MixedBlocks, in_turns
from mlmclm.corpora.mixes import MixedSamples, counts, mix_text
from mlmclm.corpora.order import block_numbers, sample_rows
from mlmclm.corpora.shelf import Shelf
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import samples_by_source, samples_of, segment_at
from mlmclm.plans.stages import history, study_fingerprint
from mlmclm.pretraining.worker import _micro_batches, _tokens

ETTIN = {
    "web": 49.1,
    "cc": 20.9,
    "code": 15.5,
    "reddit": 4.7,
    "papers": 3.4,
    "arxiv": 1.6,
    "stack": 1.1,
    "flan": 1,
    "math": 1.4,
}


def recipe(mix: Any, *phases: dict[str, Any], **more: Any) -> Recipe:
    return Recipe.model_validate({"block_length": 16, "batch": 6, "workers": 2, "mix": mix, "phases": phases, **more})


def several(**sizes: int) -> MixedBlocks:
    """Sources of so many blocks of 16 tokens, on no disk."""
    return MixedBlocks({name: Blocks(Shelf("nowhere"), [Shard("a", n, "")], 16, "<u2") for name, n in sizes.items()})


@pytest.mark.parametrize(
    "weights",
    [{"a": 0.7, "b": 0.3}, {"a": 1, "b": 1, "c": 1}, ETTIN, {"a": 999, "b": 1}, {"a": 2.5}]
    + [{str(name): random.Random(trial * 99 + name).randint(1, 50) for name in range(5)} for trial in range(5)],
)
def test_of_any_first_blocks_each_source_has_its_share_to_within_a_block(weights: dict[str, float]) -> None:
    mix = recipe(weights).mix
    assert mix is not None
    total = sum(Fraction(repr(weight)) for weight in weights.values())
    sources, numbers = MixedSamples(range(2500), mix).of_sources()
    seen = Counter[str]()
    for done, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist(), strict=True), start=1):
        name = mix[source][0]
        assert number == seen[name], "a source's blocks come in turn, none is left out"
        seen[name] += 1
        for other, weight in weights.items():
            assert abs(seen[other] - done * Fraction(repr(weight)) / total) < 1
        if done in (1, 700, 2500):
            assert counts(mix, done) == {other: seen[other] for other in weights}


def test_a_small_source_is_repeated_in_new_orders_and_nothing_is_lost_or_doubled_within_a_pass() -> None:
    blocks = several(small=7, large=500)
    mix = recipe({"large": 3, "small": 2}).mix
    assert mix is not None
    rows = block_numbers(blocks, MixedSamples(range(100), mix), 5).tolist()
    assert list(blocks.first.items()) == [("large", 0), ("small", 500)]
    large, small = [row for row in rows if row < 500], [row - 500 for row in rows if row >= 500]
    assert large == sample_rows(500, range(60), 5).tolist() and len(set(large)) == 60
    passes = [small[start : start + 7] for start in range(0, 35, 7)]
    assert all(sorted(each) == list(range(7)) for each in passes) and len(set(map(tuple, passes))) == 5


def test_each_source_goes_on_through_phases_with_other_mixes_and_lengths() -> None:
    phases: list[dict[str, Any]] = [
        {"name": "a", "steps": 13, "batch_warmup": {"steps": 5, "first": 2}},
        {"name": "b", "steps": 9, "mix": {"books": 5, "code": 1}},
        {"name": "c", "steps": 4, "block_length": 32, "mix": "code"},
        {"name": "d", "steps": 11, "block_length": 16, "mix": {"web": 0.7, "books": 0.3}},
    ]
    made = recipe({"web": 0.7, "books": 0.3}, *phases)
    segments = history(parse_name("1m-clm-20-mlm40-37"), made).segments
    sizes = {16: {"web": 60, "books": 40, "code": 9}, 32: {"web": 30, "books": 20, "code": 4}}
    rows: dict[tuple[int, str], list[int]] = {}
    for step in range(37):
        length = made.during(segment_at(segments, step).phase).block_length
        blocks, samples = several(**sizes[length]), samples_of(segments, step, made)
        for row in block_numbers(blocks, samples, 0).tolist():
            name = max((name for name, first in blocks.first.items() if first <= row), key=lambda n: blocks.first[n])
            rows.setdefault((length, name), []).append(row - blocks.first[name])
    assert rows.keys() == {(16, "web"), (16, "books"), (16, "code"), (32, "code")}
    for (length, name), seen in rows.items():
        assert seen == sample_rows(sizes[length][name], range(len(seen)), 0).tolist()
    seen_by_source = {(name, length): len(seen) for (length, name), seen in rows.items()}
    assert samples_by_source(segments, made) == seen_by_source
    assert len(rows[32, "code"]) == 4 * 6 and len(rows[16, "code"]) == 9


def test_a_mix_of_one_source_is_that_source_s_own_order() -> None:
    mix = recipe("web").mix
    assert mix == (("web", 1.0),)
    rows = block_numbers(several(web=30, books=9), MixedSamples(range(17, 70), mix), 3) - 9  # books come first
    assert rows.tolist() == sample_rows(30, range(17, 70), 3).tolist()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_divide_the_same_batch(workers: int) -> None:
    class Numbered(Blocks):
        def take(self, rows: np.ndarray) -> np.ndarray:
            return rows[:, None] + self.offset + np.zeros((1, 16), dtype=np.int64)

    blocks = several(web=30, books=9)
    for name, source in blocks.sources.items():
        source.__class__, source.offset = Numbered, blocks.first[name]  # type: ignore[attr-defined]
    made = recipe({"web": 2, "books": 1})
    segments = history(parse_name("1m-clm-4k"), made).segments
    job = SimpleNamespace(train=blocks, recipe=made, samples=lambda step: samples_of(segments, step, made))

    def label(tokens: np.ndarray, **_: Any) -> tuple[np.ndarray, np.ndarray]:
        return tokens, tokens

    for step in (0, 11, 3999):
        parts = []
        for rank in range(workers):
            engine = SimpleNamespace(world=workers, rank=rank, accumulation=2 if workers < 3 else 1)
            tokens = _tokens(job, engine, step)  # type: ignore[arg-type]
            batches = _micro_batches(job, engine, label, step, tokens)  # type: ignore[arg-type]
            parts += [ids[:, 0].tolist() for ids, _ in batches]
        expected = block_numbers(blocks, samples_of(segments, step, made), made.seed).tolist()
        assert [row for part in parts for row in part] == expected and len(expected) == 6
        assert sum(row >= 9 for row in expected) == 4, "two thirds"


def test_validation_takes_the_first_blocks_of_each_source_by_weight() -> None:
    class Numbered(Blocks):
        def take(self, rows: np.ndarray) -> np.ndarray:
            return rows[:, None]

    blocks = several(web=30, books=3, code=4)
    for source in blocks.sources.values():
        source.__class__ = Numbered
    blocks.block_length = 1
    chosen = in_turns(blocks, recipe({"web": 1, "books": 1}).mix)
    assert len(chosen) == 33
    taken = chosen.take(np.arange(10))[:, 0].tolist()
    assert sorted(taken[::2] + taken[1::2]) == sorted([0, 1, 2, 0, 1, 0, 1, 2, 3, 4]), "books begin again"


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ({"web": -0.1, "books": 1}, "web: the weight -0.1 is not a number of 0 or more"),
        ({"web": 0, "books": 0}, "its weights add up to 0"),
        ({}, "its weights add up to 0"),
        ({"web": "half"}, "web: the weight 'half' is not a number"),
        ({"web": float("inf")}, "web: the weight inf"),
        (
            {"web": 0.123456789, "books": 1},
            "cannot be written as whole numbers that sum to at most 100,000; round them",
        ),
        (["web"], "expected the name of a source, or names with their weights"),
    ],
)
def test_wrong_weights_are_refused(mix: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        recipe(mix)
    with pytest.raises(ValidationError, match=said):
        recipe("web", {"name": "a", "steps": 3, "mix": mix})


def test_a_source_that_yaml_reads_as_something_else_is_refused() -> None:
    for name in (False, 2024):
        with pytest.raises(ValidationError, match=f"the source {name} is not a string; put its name in quotes"):
            Recipe.model_validate({"mix": {name: 1, "en": 2}})


def test_weights_are_ratios_and_recipes_survive_json() -> None:
    made = recipe({"web": 7, "books": 3, "none": 0}, {"name": "a", "steps": 3, "mix": "books"})
    assert mix_text(made.mix or ()) == "70 % web, 30 % books"
    assert Recipe.model_validate(made.model_dump(mode="json")) == made
    assert [mix and mix_text(mix) for mix in made.mixes(["1m"])] == ["70 % web, 30 % books", "100 % books"]


def test_keys_of_recipes_without_mixes_are_what_they_were() -> None:
    plain = Recipe(block_length=16, batch=6, phases=[{"name": "a", "steps": 3}])
    assert "mix" not in plain.identity() and "mix" not in plain.phases_of("1m")[0].identity()
    assert recipe("web").identity()["mix"] == {"web": 1.0}
    states = [
        history(parse_name("1m-clm-3"), recipe("web", {"name": "a", "steps": 3, "mix": mix})) for mix in ("web", "b")
    ]
    assert len({state.key("x") for state in states}) == 2
    # Computed before there were mixes.
    keys = [history(parse_name("1m-clm-3"), plain).key(study_fingerprint(plain, "c", 9))]
    steps = Recipe(decay_steps=5, warmup_steps=5)
    keys += [history(parse_name("1m-clm-10-mlm40-3k"), steps).key(study_fingerprint(steps, "c", 9))]
    assert keys == [
        "6056692a1bc90d5eaf88fc788ebb8f83ff64445fdc0ab6f418e9e9af80a5432a",
        "1522bd45676db56cee272be9bf38b3eb62b7cad6dee27f286ea580980e5a333a",
    ]
