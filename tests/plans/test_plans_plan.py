"""Plans share every step that can be shared, and each model's path through the stages is its own history."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlmclm.errors import UserError
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import Segment
from mlmclm.plans.stages import Plan, State, history, make_plan, study_fingerprint
from mlmclm.studies.prepare import _padded_with_eos
from small_models import small_tokenizer

RECIPE = Recipe(warmup_steps=20, decay_steps=50)


def plan(*names: str) -> Plan:
    return make_plan([parse_name(name) for name in names], RECIPE)


def test_the_quickstart_models_share_the_first_steps_of_clm() -> None:
    made = plan("2m-clm-600", "2m-mlm40-600", "2m-clm-150-mlm40-600", "2m-untrained")
    assert [(stage.title, [state.step for state in stage.states]) for stage in made.stages] == [
        ("2m clm 0-600", [150, 600]),
        ("2m mlm40 0-600", [600]),
        ("2m mlm40 150-600", [600]),
    ]
    assert made.stages[0].models == ("2m-clm-600", "2m-clm-150-mlm40-600")
    assert (made.steps, made.steps_alone) == (1650, 1800)


def test_budgets_of_one_objective_share_the_stable_part_and_decay_apart() -> None:
    made = plan("2m-mlm40-200", "2m-mlm40-400", "2m-mlm40-600")
    assert made.steps == 600 + 50 + 50
    assert sorted(stage.start.step for stage in made.stages) == [0, 150, 350]


def test_an_intermediate_checkpoint_is_no_run_of_its_own() -> None:
    assert plan("2m-clm-600", "2m-clm-600-100", "2m-clm-600-300").steps_alone == 600
    assert plan("2m-clm-600-100", "2m-clm-600-300").steps_alone == 300


def test_stretches_name_the_models_that_each_step_is_trained_for() -> None:
    made = plan("2m-clm-600", "2m-clm-150-mlm40-600", "2m-clm-300-mlm40-600", "2m-clm-600-400")
    trunk, early, late = made.tree()
    assert [(part.start, part.stop, len(part.models)) for part in made.stretches(trunk)] == [
        (0, 150, 4), (150, 300, 3), (300, 400, 2), (400, 600, 1),
    ]  # fmt: skip
    assert made.steps_shared == 400
    assert made.stretches(late)[0].models == ("2m-clm-300-mlm40-600",)
    assert made.parent(early) == made.parent(late) == trunk
    assert [made.depth(stage) for stage in made.tree()] == [0, 1, 1]


def test_models_of_two_sizes_share_nothing() -> None:
    made = plan("1m-clm-600", "2m-clm-600")
    assert made.steps == made.steps_alone == 1200


def test_a_continued_model_starts_from_the_decayed_state_and_warms_up_again() -> None:
    made = plan("2m-clm-600", "2m-clm-dec600-mlm40-900")
    assert made.steps == 900
    second = made.stages[1]
    assert second.start == made.targets[0]
    rates = [
        next(segment for segment in second.end.segments if segment.start <= s < segment.stop).rate(s, RECIPE)
        for s in range(900)
    ]
    assert rates[599] == pytest.approx(RECIPE.peak_learning_rate / 50)
    assert rates[600] == pytest.approx(RECIPE.peak_learning_rate / 20)
    assert rates[619] == RECIPE.peak_learning_rate


def test_a_phase_that_would_never_reach_the_peak_is_refused_with_what_to_change() -> None:
    """Warm-up and decay multiplied each other: 2,000 steps after `dec42k` peaked at a quarter of the rate."""
    published = Recipe()
    with pytest.raises(
        UserError, match=r"610m-clm-dec42k-mlm40-44k.*from 42,000 to 44,000 .*End at step 46,000.*rewarmup_steps"
    ):
        history(parse_name("610m-clm-dec42k-mlm40-44k"), published)
    with pytest.raises(
        UserError, match=r"warmup_steps 2,000 and decay_steps 2,000 together.*End at step 4,000 or later"
    ):
        history(parse_name("610m-clm-3k"), published)
    with pytest.raises(UserError, match=r"rewarmup_steps 30 and decay_steps 50 together.*shorten rewarmup_steps"):
        history(parse_name("2m-clm-dec100-mlm40-170"), Recipe(warmup_steps=20, rewarmup_steps=30, decay_steps=50))


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"the 100 steps from 0 to 100 are fewer than the recipe's warmup_steps 101"):
        history(parse_name("2m-clm-100"), Recipe(warmup_steps=101, decay_steps=0))
    history(parse_name("2m-clm-100"), Recipe(warmup_steps=100, decay_steps=0))


def test_every_phase_that_is_not_refused_reaches_the_peak() -> None:
    chance = random.Random(1)
    refused = 0
    for _ in range(300):
        again = chance.choice([None, 0, chance.randint(0, 20)])
        recipe = Recipe(warmup_steps=chance.randint(0, 20), decay_steps=chance.randint(0, 20), rewarmup_steps=again)
        a, b = chance.randint(1, 30), chance.randint(1, 30)
        name = parse_name(f"2m-clm-{chance.choice(['', 'dec'])}{a}-mlm40-{a + b}")
        try:
            segments = history(name, recipe).segments
        except UserError:
            refused += 1
            continue
        for origin in {segment.origin for segment in segments}:
            own = [segment for segment in segments if segment.origin == origin]
            rates = [segment.rate(step, recipe) for segment in own for step in range(segment.start, segment.stop)]
            assert max(rates) == recipe.peak_learning_rate, f"{name} {recipe}"
    assert 50 < refused < 250


def test_a_decay_that_begins_with_the_last_step_of_the_warm_up_is_no_mistake() -> None:
    recipe = Recipe(warmup_steps=5, decay_steps=4)
    segments = history(parse_name("2m-clm-8"), recipe).segments
    assert (
        max(segment.rate(step, recipe) for segment in segments for step in range(segment.start, segment.stop))
        == recipe.peak_learning_rate
    )
    with pytest.raises(UserError, match="never reach its peak"):
        history(parse_name("2m-clm-7"), recipe)


def test_a_warm_up_of_its_own_after_a_decay_changes_the_rates_and_keys_of_what_follows_only() -> None:
    name, own = parse_name("2m-clm-dec600-mlm40-900"), Recipe(warmup_steps=20, decay_steps=50, rewarmup_steps=0)
    usual, other = history(name, RECIPE), history(name, own)
    assert other.segments[-2].rate(600, own) == own.peak_learning_rate
    assert study_fingerprint(RECIPE, "corpus", 10) == study_fingerprint(own, "corpus", 10)
    assert usual.key("a") != other.key("a")
    assert history(parse_name("2m-clm-600"), RECIPE).key("a") == history(parse_name("2m-clm-600"), own).key("a")
    same = Recipe(warmup_steps=20, decay_steps=50, rewarmup_steps=20)
    assert history(name, same).key("a") == usual.key("a")


def test_every_model_of_random_suites_is_reached_through_stages_that_start_where_others_end() -> None:
    chance = random.Random(0)
    shapes = ["clm-{b}", "mlm40-{b}", "clm-{a}-mlm40-{b}", "clm-dec{a}-mlm40-{b}", "mlm40-{a}-clm-{b}", "clm-{b}-{a}"]
    for _ in range(200):
        names = set()
        for _ in range(chance.randint(1, 7)):
            a = chance.choice([70, 150, 151, 300])
            b = a + chance.choice([70, 200, 450])
            names.add(f"2m-{chance.choice(shapes).format(a=a, b=b)}")
        ordered = sorted(names, key=lambda _: chance.random())
        made = plan(*ordered)
        reached = {State("2m", ())}
        steps_trained: set[tuple[object, ...]] = set()
        for stage in made.stages:
            assert stage.start in reached
            assert all(segment.objective == stage.objective for segment in stage.segments)
            assert stage.states[-1].step == max(state.step for state in stage.states)
            reached |= set(stage.states)
            for step in range(stage.start.step, stage.end.step):
                identity = _path_until(stage.end, step + 1)
                assert identity not in steps_trained, f"{ordered}: step {step} of {stage.title} is trained twice"
                steps_trained.add(identity)
        assert set(made.targets) <= reached
        assert sorted(made.tree(), key=made.stages.index) == list(made.stages)
        for stage in made.stages:
            for part in made.stretches(stage):
                users = {str(n) for n, t in zip(made.models, made.targets, strict=True)
                         if _path_until(stage.end, part.stop) == _path_until(t, part.stop) and t.step >= part.stop}  # fmt: skip
                assert set(part.models) == users
        wanted = {_path_until(t, step + 1) for t in made.targets for step in range(t.step)}
        assert steps_trained == wanted, f"{ordered}: not exactly the steps that the models need"


def _path_until(state: State, step: int) -> tuple[object, ...]:
    """The history of a state up to a step: the objective of each stretch and what decides its learning rates."""
    return tuple(
        (str(segment.objective), segment.start, min(segment.stop, step), segment.origin, segment.decay_end)
        for segment in state.segments
        if segment.start < step
    )


def test_a_state_s_key_changes_with_history_recipe_and_nothing_else() -> None:
    state = history(parse_name("2m-clm-600"), RECIPE)
    keys = [
        state.key("a"),
        state.key("b"),
        history(parse_name("2m-clm-601"), RECIPE).key("a"),
        history(parse_name("1m-clm-600"), RECIPE).key("a"),
        history(parse_name("2m-clm-600"), Recipe(warmup_steps=20, decay_steps=51)).key("a"),
    ]
    assert len(set(keys)) == len(keys)
    assert history(parse_name("2m-clm-600-100"), RECIPE).key("a") == State(
        "2m", (Segment(parse_name("2m-clm-600").phases[0].objective, 0, 100, 0),)
    ).key("a")


def test_the_default_corruption_leaves_a_state_s_key_as_it_was_before_there_was_a_choice() -> None:
    assert study_fingerprint(Recipe(), "k", 5) != study_fingerprint(Recipe(), "k", 5, padded_with_eos=True)
    spelled = {"mask": 1.0, "random": 0.0, "keep": 0.0}
    assert (
        study_fingerprint(Recipe(batch=2304), "k", 5)
        == "aee61cceeca6c82878cffe26bdf61454316a0712600aa3c14c21ae36c751a424"
    )
    assert Recipe.model_validate({"corruption": spelled}).identity() == Recipe().identity()
    bert = {"mask": 0.8, "random": 0.1, "keep": 0.1}
    assert Recipe.model_validate({"corruption": bert}).identity() == Recipe().identity() | {"corruption": bert}


def test_weights_of_losses_and_isolation_enter_a_state_s_key_only_where_they_are_not_the_default() -> None:
    plain = Recipe().identity()
    assert not {"loss_weights", "isolate_documents", "compile"} & plain.keys()
    spelled = Recipe.model_validate({"loss_weights": {"clm": 1.0}, "isolate_documents": False, "compile": True})
    assert spelled.identity() == plain
    weighted = Recipe.model_validate({"loss_weights": {"mlm": 0.5}})
    assert weighted.identity() == plain | {"loss_weights": {"clm": 1.0, "mlm": 0.5}}
    assert Recipe(isolate_documents=True).identity() == plain | {"isolate_documents": True}


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_a_loss_s_weight_is_a_positive_number(weight: float) -> None:
    with pytest.raises(ValueError, match=r"loss_weights\.mlm"):
        Recipe.model_validate({"loss_weights": {"mlm": weight}})


def test_a_phase_shorter_than_its_decay_is_refused() -> None:
    with pytest.raises(UserError, match="fewer than the recipe's decay_steps 50"):
        plan("2m-clm-40")
    with pytest.raises(UserError, match="phase of mlm40 takes 10 steps"):
        plan("2m-clm-590-mlm40-600")


def test_a_batch_that_does_not_divide_is_refused_with_what_would() -> None:
    with pytest.raises(ValueError, match="allowed numbers of workers: 1, 2, 4, 8"):
        Recipe(batch=8, workers=3)
    with pytest.raises(ValueError, match="does not divide a worker's share of the batch, 4"):
        Recipe(batch=8, workers=2, micro_batch=3)


def test_a_study_is_another_one_where_a_pad_token_is_eos(tmp_path: Path) -> None:
    """Fresh models have the tokenizer's; a given model has its configuration's, which alone decides which row transformers freezes."""
    for name, pad in (("own", "<pad>"), ("shared", "<eos>")):
        tokenizer = small_tokenizer()
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "given").mkdir()
    study, given = SimpleNamespace(parsed=[parse_name("1m-clm-600")]), SimpleNamespace(folder=tmp_path / "given")
    for corpus, given_pad, expected in (
        ("own", None, False),
        ("shared", None, True),
        ("shared", -1, False),
        ("own", 2, True),
    ):
        initial = {} if given_pad is None else {"1m": given}
        (tmp_path / "given" / "config.json").write_text(json.dumps({"pad_token_id": given_pad}))
        found = _padded_with_eos(study, SimpleNamespace(tokenizer=tmp_path / corpus), initial)  # type: ignore[arg-type]
        assert found is expected
