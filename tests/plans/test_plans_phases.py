"""Training phases: their lengths, rates and batches against closed forms and brute force, and what models share in them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mlmclm.corpora.order import sample_rows
from mlmclm.errors import UserError
from mlmclm.models.sizes import SIZES
from mlmclm.plans.costs import Pricing
from mlmclm.plans.devices import DEVICES
from mlmclm.plans.names import parse_name
from mlmclm.plans.phases import BatchWarmup, TrainingPhase, samples_in, steps_of
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import revision_steps, samples_of, segment_at
from mlmclm.plans.stages import history, make_plan, study_fingerprint
from mlmclm.pretraining.engine import deepspeed_config
from mlmclm.pretraining.partitioning import Replicated

ETTIN: tuple[dict[str, Any], ...] = (
    {"name": "pretrain", "steps": 100, "warmup_steps": 10, "batch_warmup": {"steps": 30, "first": 4}, "rope_base": 1e4},
    {"name": "ext", "steps": 40, "block_length": 64, "batch": 4, "decay": "1-sqrt", "final_share": 0.5, "rope_base": 1.6e5},
    {"name": "decay", "steps": 20, "peak_learning_rate": 5e-4, "decay": "1-sqrt", "final_share": 0.04},
    {"name": "cross", "steps": 20, "warmup_steps": 3, "decay": "linear", "decay_steps": 10, "final_share": 0.02, "moments": "new"},
)  # fmt: skip


def recipe(*phases: dict[str, Any], **more: Any) -> Recipe:
    base = {"block_length": 16, "batch": 16, "peak_learning_rate": 1e-3, "workers": 2}
    return Recipe.model_validate(base | {"phases": list(phases) or list(ETTIN)} | more)


def test_rates_are_the_closed_forms_of_ettin_s_configurations() -> None:
    state = history(parse_name("1m-mlm30-160-clm-180"), recipe())
    found = [segment_at(state.segments, step).rate(step, recipe()) for step in range(180)]
    expected = [1e-3 * min(1, (step + 1) / 10) for step in range(100)]
    expected += [1e-3 * (0.5 + 0.5 * (1 - math.sqrt(done / 40))) for done in range(40)]
    expected += [5e-4 * (0.04 + 0.96 * (1 - math.sqrt(done / 20))) for done in range(20)]
    expected += [5e-4 * min(1, (done + 1) / 3) * (0.02 + 0.98 * min(1, (20 - done) / 10)) for done in range(20)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_revisions_by_tokens_are_the_steps_at_which_the_tokens_so_far_reach_a_multiple() -> None:
    for every in (100, 1_000, 3_333, 10**9):
        own = recipe(revisions_every_tokens=every)
        segments = history(parse_name("1m-mlm30-160-clm-180"), own).segments
        lengths = [16] * 100 + [64] * 80  # a phase keeps the length of the one before
        seen = np.cumsum([length * len(samples_of(segments, step, own)) for step, length in enumerate(lengths)])
        expected = [
            0,
            *(step + 1 for step in range(180) if seen[step] // every > (seen[step - 1] if step else 0) // every),
        ]
        assert revision_steps(segments, own) == expected
    assert revision_steps(segments, recipe(revisions_every=50)) == [0, 50, 100, 150]
    assert revision_steps(segments, recipe()) == []
    assert recipe(revisions_every_tokens=5).identity() == recipe().identity()
    with pytest.raises(ValidationError, match="the tokens of chunks depend on the text"):
        Recipe(rows="chunks", revisions_every_tokens=5)


@pytest.mark.parametrize("trial", range(30))
def test_samples_are_the_sum_of_the_batches_and_sizes_take_equal_times(trial: int) -> None:
    chance = random.Random(trial)
    batch, first, grown = chance.randint(2, 40), chance.randint(2, 12), chance.randint(1, 60)
    first = min(first, batch)
    whole = recipe({"name": "a", "steps": 100, "batch_warmup": {"steps": grown, "first": first}}, batch=2 * batch)
    (phase,) = whole.phases_of("1m")
    sizes = [phase.batch_at(step) for step in range(100)]
    assert [phase.samples(step) for step in range(101)] == [0, *np.cumsum(sizes).tolist()]
    assert set(sizes[grown:]) == {2 * batch}, "full after the warm-up"
    below = list(range(first, 2 * batch, first)) or [2 * batch]
    times = [sizes[:grown].count(size) for size in below]
    assert sum(times) == grown and max(times) - min(times) <= 1 and sizes == sorted(sizes)


@pytest.mark.parametrize("trial", range(20))
def test_tokens_are_the_fewest_whole_steps(trial: int) -> None:
    chance = random.Random(trial)
    tokens, length, batch = chance.randint(1, 30_000), 16, chance.randint(1, 30)
    warmup = BatchWarmup(steps=chance.randint(1, 40), first=chance.randint(1, batch)) if trial % 2 else None
    steps = steps_of(TrainingPhase(name="a", tokens=tokens, batch_warmup=warmup), block_length=length, batch=batch)
    assert samples_in(steps, batch, warmup) * length >= tokens > samples_in(steps - 1, batch, warmup) * length


def test_no_row_is_lost_or_doubled_and_phases_of_one_length_go_on_in_one_order() -> None:
    phases = ({"name": "a", "steps": 12, "batch_warmup": {"steps": 7, "first": 4}}, {"name": "b", "steps": 5, "block_length": 32},
              {"name": "c", "steps": 4, "block_length": 16, "batch": 8})  # fmt: skip
    made = recipe(*phases)
    segments = history(parse_name("1m-clm-21"), made).segments
    blocks, rows = {16: 1000, 32: 500}, dict[int, list[int]]()
    for step in range(21):
        length = made.during(segment_at(segments, step).phase).block_length
        rows.setdefault(length, []).extend(sample_rows(blocks[length], samples_of(segments, step, made), 0).tolist())
    for length, seen in rows.items():
        assert seen == sample_rows(blocks[length], range(len(seen)), 0).tolist()
        assert len(set(seen)) == len(seen)
    # Independent count: sizes 4, 8, 12 of the warm-up over 7 steps, then 5 of 16; 5 of 16 of the other length; 4 of 8.
    assert len(rows[16]) == 4 * 3 + 8 * 2 + 12 * 2 + 5 * 16 + 4 * 8 and len(rows[32]) == 5 * 16


def test_models_share_their_trunk_through_all_phases() -> None:
    names = (
        "1m-mlm30-100",
        "1m-mlm30-140",
        "1m-mlm30-160",
        "1m-mlm30-160-clm-180",
        "1m-mlm30-140-mlm15-160",
        "1m-clm-160",
    )
    plan = make_plan([parse_name(name) for name in names], recipe())
    assert [(stage.title, stage.end.segments[-1].phase.name) for stage in plan.tree() if stage.end.segments[-1].phase] == [
        ("1m mlm30 0-100", "pretrain"), ("1m mlm30 100-140", "ext"), ("1m mlm30 140-160", "decay"),
        ("1m clm 160-180", "cross"), ("1m mlm15 140-160", "decay"),
        ("1m clm 0-100", "pretrain"), ("1m clm 100-140", "ext"), ("1m clm 140-160", "decay"),
    ]  # fmt: skip
    assert plan.steps == 160 + 20 + 20 + 160


def test_keys_have_what_changes_the_weights_and_nothing_else() -> None:
    def key(name: str, *phases: dict[str, Any], **more: Any) -> str:
        made = recipe(*phases, **more)
        return history(parse_name(name), made).key(study_fingerprint(made, "corpus", 100))

    first, second = ETTIN[:2]
    own = key("1m-clm-140", first, second)
    assert key("1m-clm-140", *ETTIN) == own, "a later phase changes nothing"
    assert key("1m-clm-140", first | {"name": "other"}, second) == own
    tokens = {name: value for name, value in second.items() if name != "steps"} | {"tokens": 40 * 64 * 4}
    assert key("1m-clm-140", first, tokens) == own
    longer = first | {"steps": 200}
    assert key("1m-clm-140-50", first, second) == key("1m-clm-200-50", longer), "a longer phase without decay shares"
    changes: tuple[dict[str, Any], ...] = (
        {"block_length": 32}, {"batch": 8}, {"peak_learning_rate": 2e-3}, {"warmup_steps": 2}, {"decay": "linear"},
        {"decay_steps": 10}, {"final_share": 0.1}, {"rope_base": 2e5}, {"local_rope_base": 2e5}, {"moments": "new"},
        {"batch_warmup": {"steps": 3, "first": 2}},
        {"weight_decay": 0.2},
    )  # fmt: skip
    keys = [key("1m-clm-140", first, second | change) for change in changes]
    assert len({own, *keys}) == len(changes) + 1


def test_an_untrained_model_s_key_has_the_shape_that_it_takes_from_the_first_phase() -> None:
    def key(*phases: dict[str, Any], **more: Any) -> str:
        made = recipe(*phases, **more) if phases else Recipe(block_length=16, batch=16, workers=2, **more)
        return history(parse_name("1m-untrained"), made).key(study_fingerprint(Recipe(batch=16), "corpus", 100))

    phase = {"name": "a", "steps": 5}
    keys = [
        key(),
        key(phase),
        key(phase | {"block_length": 32}),
        key(phase | {"rope_base": 2e5}),
        key(phase | {"local_rope_base": 2e5}),
    ]
    assert len(set(keys)) == len(keys)
    assert key(phase, phase | {"name": "b", "block_length": 32}) == key(phase | {"steps": 9}) == keys[1]


@pytest.mark.parametrize("trial", range(30))
def test_a_micro_batch_in_tokens_fits_the_sequences_of_each_phase_and_divides_its_share(trial: int) -> None:
    chance = random.Random(trial)
    workers, tokens = chance.randint(1, 4), chance.randint(64, 800)
    lengths, batches = (16, 64, 32), [workers * chance.randint(1, 24) for _ in range(3)]
    phases = [
        {"name": name, "steps": 5, "block_length": length, "batch": batch}
        for name, length, batch in zip("abc", lengths, batches, strict=True)
    ]
    made = recipe(*phases, batch=batches[0], workers=workers, micro_batch_tokens=tokens)
    for phase, length, batch in zip(made.phases_of("1m"), lengths, batches, strict=True):
        own, share = made.during(phase), batch // workers
        at_once = own.sequences_at_once(workers)
        allowed = [count for count in range(1, share + 1) if share % count == 0 and count * length <= tokens]
        assert at_once == max(allowed)
        config = deepspeed_config(own, workers, Replicated, 10**6)
        assert config["train_micro_batch_size_per_gpu"] == at_once
        assert config["gradient_accumulation_steps"] * at_once * workers == config["train_batch_size"] == batch


def test_a_warm_up_of_a_whole_phase_without_decay_is_allowed() -> None:
    assert history(parse_name("1m-clm-5"), recipe({"name": "a", "steps": 5, "warmup_steps": 5})).step == 5


def test_costs_count_each_phase_s_tokens() -> None:
    made = recipe()
    plan = make_plan([parse_name("1m-clm-160")], made)
    phases = made.phases_of("1m")
    tokens = sum(
        phase.batch_at(step) * phase.block_length for phase in phases[:3] for step in range(phase.start, phase.stop)
    )
    assert Pricing(made, 100, next(iter(DEVICES))).plan(plan).tokens == tokens == plan.targets[0].tokens(made)


def test_without_phases_nothing_is_new() -> None:
    plain = Recipe()
    assert not {"phases", "phases_by_size", "rope_base", "local_rope_base"} & plain.identity().keys()
    segments = history(parse_name("1m-clm-5k"), plain).segments
    assert [segment.identity() for segment in segments] == [["clm", 0, 3000, 0, None], ["clm", 3000, 5000, 0, 5000]]
    assert samples_of(segments, 3100, plain) == range(3100 * 1152, 3101 * 1152)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "1m-clm-150",
            r"ends at step 150, but the recipe's phases end at 100 \(pretrain\), 140 \(ext\), 160 \(decay\), 180",
        ),
        ("1m-clm-200", "ends at step 200"),
        ("1m-clm-dec100-mlm30-160", "leave out 'dec'"),
    ],
)
def test_a_name_that_does_not_fit_the_phases_says_where_they_end(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        history(parse_name(name), recipe())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": [{"name": "a"}]}, "either steps or tokens"),
        ({"phases": [{"name": "a", "steps": 3, "tokens": 9}]}, "either steps or tokens"),
        ({"phases": [{"name": "a", "steps": 5}, {"name": "a", "steps": 5}]}, "two are called a"),
        ({"phases": [{"name": "a", "steps": 5, "warmup_steps": 6}]}, "more than its 5 steps"),
        ({"phases": [{"name": "a", "tokens": 1000, "warmup_steps": 6}]}, "its 4 steps are fewer"),
        ({"phases": [{"name": "a", "steps": 5, "block_length": 24}]}, "block_length 24 neither divides the recipe's 16"),
        ({"phases": [{"name": "a", "steps": 5, "batch": 7}]}, "batch 7 does not divide by workers 2"),
        ({"phases": [{"name": "a", "steps": 5, "decay": "linaer"}]}, "'linaer'. Did you mean 'linear'"),
        ({"phases": [{"name": "a", "steps": 5, "batch_warmup": {"steps": 2, "first": 1}}]}, "not between 2"),
        ({"phases": [{"name": "a", "steps": 5}], "warmup_steps": 7}, "warmup_steps: the phases have schedules of their own"),
        ({"phases_by_size": {"1m": [{"name": "a", "steps": 5, "block_length": 24}]}}, "block_length 24"),
        ({"phases": [{"name": "a", "steps": 5, "decay_steps": 2}]}, "there is none; give decay: linear"),
        ({"phases": [{"name": "a", "steps": 5, "final_share": 0.1}]}, "there is none; give decay: linear"),
        ({"phases": [{"name": "step", "steps": 5}]}, "choose another name"),
        ({"phases": [{"name": "a", "steps": 5}, {"name": "b", "steps": 5, "block_length": 64}], "micro_batch_tokens": 63},
         "phase 'b': micro_batch_tokens 63 has no room for a sequence of block_length 64"),
        ({"micro_batch": 2, "micro_batch_tokens": 64}, "give one of them"),
    ],
)  # fmt: skip
def test_wrong_phases_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(**changes)


def test_phases_by_size_are_those_of_the_size() -> None:
    made = recipe({"name": "a", "steps": 7}, phases_by_size={"2m": [{"name": "a", "steps": 9}]})
    assert history(parse_name("2m-clm-9"), made).step == 9
    assert history(parse_name("1m-clm-7"), made).step == 7


def test_settings_that_a_phase_cannot_have_are_named() -> None:
    grows = {"name": "a", "steps": 20, "batch_warmup": {"steps": 21, "first": 2}}
    with pytest.raises(ValidationError, match=r"phase 'a': batch_warmup.steps 21 are more than its 20 steps"):
        Recipe.model_validate({"batch": 8, "phases": [grows]})
    with pytest.raises(ValidationError, match=r"phase 'a': batch 3 does not divide by workers 2; allowed") as raised:
        Recipe.model_validate({"batch": 8, "workers": 2, "phases": [{"name": "a", "steps": 5, "batch": 3}]})
    assert "validation error" not in raised.value.errors()[0]["msg"], "pydantic's own words"
    local = Recipe.model_validate({"phases": [{"name": "a", "steps": 5, "local_rope_base": 5000}]})
    with pytest.raises(
        UserError, match=r"phases: 'a': local_rope_base 5000: .* \(eurobert\) have no layers with local"
    ):
        local.check_positions("1m", SIZES["1m"])
    local.check_positions("ettin17m", SIZES["ettin17m"])
    with pytest.raises(UserError, match=r"recipe: rope_base 7: models of size mine \(bert\) have no rotary positions"):
        Recipe(rope_base=7).check_positions("mine", replace(SIZES["1m"], architecture="bert"))


def test_new_moments_in_the_first_phase_make_no_other_states() -> None:
    keys = [
        history(parse_name("1m-clm-5"), recipe({"name": "a", "steps": 5, "moments": moments})).key("x")
        for moments in ("keep", "new")
    ]
    assert keys[0] == keys[1]
