"""Replicates of a model: other seeds of the streams that vary, the same of those that are fixed, trunks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_training import prepared

from mlmclm.errors import UserError
from mlmclm.plans.names import parse_name
from mlmclm.plans.pretraining_seeds import PretrainingSeeds
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import make_plan
from mlmclm.pretraining import states
from mlmclm.pretraining.seen import TrainingBatch, training_batches
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import PreparedStudy, find_prepared
from mlmclm.studies.study_file import load_study
from mlmclm.studies.study_sweep import study_space
from mlmclm.studies.work import train_missing_stages

RECIPE = {"warmup_steps": 10, "decay_steps": 10, "seed": 5}


def test_replicates_take_the_next_seeds_unless_streams_are_given() -> None:
    assert [tuple(Recipe.model_validate(RECIPE).seeds_of(number)) for number in (1, 2, 3)] == [
        (5,) * 3,
        (6,) * 3,
        (7,) * 3,
    ]
    chosen = Recipe.model_validate(RECIPE | {"pretraining_seeds": {"weights": 5, "masks": [9, 5]}})
    assert [tuple(chosen.seeds_of(number)) for number in (1, 2)] == [(5, 5, 9), (5, 6, 5)]
    with pytest.raises(UserError, match=r"masks: \[9, 5\] has no seed for replicate 3; add one"):
        chosen.seeds_of(3)
    fixed = Recipe.model_validate(RECIPE | {"pretraining_seeds": {"weights": 1, "order": 1, "masks": 1}})
    with pytest.raises(UserError, match="replicates 1 and 2 would have the same seeds"):
        fixed.seeds_of(2)


def test_trunks_are_shared_within_a_replicate_and_the_first_has_the_keys_of_a_study_without() -> None:
    recipe = Recipe.model_validate(RECIPE)
    names = [
        parse_name(name) for name in ("1m-clm-1k", "1m-clm-500-mlm40-1k", "1m-clm-1k-r2", "1m-clm-500-mlm40-1k-r2")
    ]
    plan = make_plan(names, recipe)
    assert plan.steps == 2 * make_plan(names[:2], recipe).steps == 3000
    assert [stage.models for stage in plan.stages] == [
        ("1m-clm-1k", "1m-clm-500-mlm40-1k"), ("1m-clm-1k-r2", "1m-clm-500-mlm40-1k-r2"),
        ("1m-clm-500-mlm40-1k",), ("1m-clm-500-mlm40-1k-r2",),
    ]  # fmt: skip
    assert plan.targets[:2] == make_plan(names[:2], recipe).targets
    assert len({state.key("shared") for state in plan.targets}) == 4
    # The keys are those of a recipe whose streams have the same seeds in another way.
    same = recipe.model_copy(
        update={"pretraining_seeds": recipe.pretraining_seeds.model_copy(update={"order": (5, 6)})}
    )
    assert make_plan(names, same).targets == plan.targets


def test_a_study_lists_the_replicates_of_all_models_and_their_protocol_is_the_models(study_path: Path) -> None:
    content = yaml.safe_load(study_path.read_text())
    content |= {"models": ["1m-untrained", "1m-clm-30", "1m-clm-30-r3"], "replicates": 2}
    content |= {"per_model": {"1m-clm-30": {"epochs": 2}, "1m-clm-30-r3": {"epochs": 3}}}
    path = study_path.with_name("replicates.yaml")
    path.write_text(yaml.safe_dump(content))
    study = load_study(path)
    assert study.models == ("1m-untrained", "1m-untrained-r2", "1m-clm-30", "1m-clm-30-r2", "1m-clm-30-r3")
    assert tuple(map(str, study.parsed)) == study.models
    epochs = [study_space(study).for_model(name).protocol_for("sst2").epochs for name in study.models]
    assert epochs[2:] == [2, 2, 3]


def test_a_fixed_stream_is_the_same_in_all_replicates(finished_study: Any) -> None:
    place = Place(finished_study.store, finished_study.study.parent / "data")
    made = find_prepared(load_study(finished_study.study), place)
    assert made is not None
    corpus, models = made.corpus, ("1m-mlm40-30", "1m-mlm40-30-r2")

    def batches(model: str, **seeds: int) -> list[TrainingBatch]:
        recipe = made.study.recipe.model_copy(update={"pretraining_seeds": PretrainingSeeds(**seeds)})
        return list(
            training_batches(corpus.train, recipe, range(3), model=parse_name(model), tokenizer=corpus.tokenizer)
        )

    def same(one: list[TrainingBatch], two: list[TrainingBatch], field: str) -> bool:
        return all(np.array_equal(getattr(a, field), getattr(b, field)) for a, b in zip(one, two, strict=True))

    first, second = (batches(model, order=0) for model in models)
    assert same(first, second, "blocks") and not same(first, second, "input_ids")
    first, second = (batches(model, masks=0) for model in models)
    assert not same(first, second, "blocks")
    # Masks are a function of row and position, but end tokens, which are never masked, stand elsewhere. Independent masks
    # of 40 % agree at 52 % of the positions.
    agreement = [np.mean((a.labels >= 0) == (b.labels >= 0)) for a, b in zip(first, second, strict=True)]  # type: ignore[operator]
    assert min(agreement) > 0.9


@pytest.mark.slow
def test_replicates_differ_and_each_is_bit_equal_to_a_study_with_its_seed(
    session: None, study_path: Path, tmp_path: Path
) -> None:
    def weights(made: PreparedStudy, model: str) -> dict[str, torch.Tensor]:
        key = made.target(parse_name(model)).key(made.fingerprint)
        return load_file(states.state_folder(made.place.store, key) / "state.safetensors")

    def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
        assert one.keys() == two.keys()
        return all(torch.equal(one[name], two[name]) for name in one)

    made = prepared(study_path, tmp_path / "a", "1m-clm-10-mlm40-20", "1m-clm-10-mlm40-20-r2", workers=1)
    train_missing_stages(made)
    again = prepared(study_path, tmp_path / "b", "1m-clm-10-mlm40-20", workers=1, seed=1)
    train_missing_stages(again)
    first, second = (weights(made, model) for model in made.study.models)
    assert not equal(first, second)
    assert equal(second, weights(again, "1m-clm-10-mlm40-20"))
