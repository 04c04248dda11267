"""Members that a notebook registers train on several workers, and a callback's state survives the workers."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_training import dying_at, prepared

import mlmclm
from mlmclm.errors import UserError
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.launches import run_stage as launch
from mlmclm.models.folder import weights_hash
from mlmclm.objectives.mlm import Masked
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import states
from mlmclm.pretraining.callbacks.callback import added_kinds
from mlmclm.pretraining.checkpoints import TrainingState, read_tensors, write_tensors
from mlmclm.registry import KINDS
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.work import train_missing_stages
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.prepare_task import prepare_task
from registered_members import Averaged, Faded
from small_models import save_small_model, write_sentiment

FIRST_HALF = """
import mlmclm
from mlmclm.objectives.mlm import Masked

@mlmclm.register("objective")
class FirstHalf(Masked):
    '''`half15`: as `mlm15`, but nothing in the second half of a row is predicted.'''

    name = "half"

    def label(self, tokens, draw):
        inputs, labels = super().label(tokens, draw)
        labels[:, tokens.shape[1] // 2 :] = -100
        return inputs, labels
"""


ROOT = """
import mlmclm
from mlmclm.schedules.decay import Decay

def power(left):
    return left**0.5

@mlmclm.register("schedule")
class Root(Decay):
    name = "root"

    def factor(self, left):
        return power(left)
"""


def run_as_cell(source: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a cell as a notebook's kernel does: in a `__main__` that has no file, and that workers don't have."""
    file.write_text(source)
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(source, str(file), "exec"), module.__dict__)


pytestmark = pytest.mark.usefixtures("registers")


def end(made: PreparedStudy) -> Path:
    return states.state_folder(made.place.store, made.plan.targets[0].key(made.fingerprint))


def test_an_objective_of_a_notebook_is_trained_by_a_worker(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_cell(FIRST_HALF, tmp_path / "cell.py", monkeypatch)
    made = prepared(study_path, tmp_path / "store", "1m-half15-12", evaluate_every=6, workers=1)
    train_missing_stages(made)
    rows = [row for row in states.curve(made.place.store, end(made).name) if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, 13)]
    share = np.mean([row["labelled"] / row["tokens"] for row in rows])
    assert 0.05 < share < 0.1, "half of 15 %: what the notebook says, not what it is derived from"
    assert states.read_description(end(made))["legs"][0][0].startswith("half15@")
    assert issubclass(KINDS["objective"]["half"], Masked)


@pytest.mark.slow
def test_cells_with_a_schedule_of_a_notebook_are_computed_by_workers_to_the_same_bits(
    session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_cell(ROOT, tmp_path / "cell.py", monkeypatch)
    write_sentiment(tmp_path / "data", train=80, test=30)
    folder = save_small_model(tmp_path / "model")
    protocol = Protocol(max_steps=6, max_length=48, stride=8, batch_size=8, decay="root")
    space = Space(tasks=("sst2",), learning_rates=(1e-3,), seeds=(0,), protocol=protocol)
    places = {"store": tmp_path, "data_root": tmp_path / "data"}
    data = {"sst2": prepare_task(get_task("sst2"), folder, protocol, **places).task_data}
    (cell,) = expand(space, [SweepModel("a", folder, weights_hash(folder))], data)
    outcome = run_sweep([cell], SweepOptions(**places))
    outcome.check()
    (found,) = outcome.results
    assert found["protocol"]["decay"] == KINDS["schedule"].keyed("root") != "root"
    alone, linear = (run_cell(replace(cell, protocol=one), **places) for one in (protocol, Protocol(**dict(protocol) | {"decay": "linear"})))  # fmt: skip
    assert found["key"] == alone["key"] != linear["key"]
    assert (found["scores"], found["curve"]) == (alone["scores"], alone["curve"])
    assert found["curve"] != linear["curve"]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_callback_s_state_to_the_same_bits(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlmclm.register("callback", "faded", Faded)
    undisturbed, disturbed = (
        prepared(study_path, tmp_path / name, "1m-clm-20", callbacks=("faded",)) for name in ("one", "other")
    )
    train_missing_stages(undisturbed)

    monkeypatch.setattr(launch, "run_in_worker", dying_at(13))
    train_missing_stages(disturbed)
    assert (tmp_path / "other" / "killed-0").exists(), "no worker was killed, so nothing was tested"
    one, other = (load_file(end(made) / "state.safetensors") for made in (undisturbed, disturbed))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    kept, again = (read_tensors(end(made)).callbacks["faded"] for made in (undisturbed, disturbed))
    assert kept["norms"] == again["norms"] and len(kept["norms"]) == 20
    assert torch.equal(kept["mean"], one["c/faded/mean"]) and float(kept["mean"][1]) == pytest.approx(10.5)
    plain = prepared(study_path, tmp_path / "one", "1m-clm-20")
    assert end(plain) != end(undisturbed), "a callback that may change the weights is in their key"


def test_a_callback_that_only_observes_is_in_no_key(study_path: Path, tmp_path: Path) -> None:
    mlmclm.register("callback", "watching", type("Watching", (Faded,), {"observes": True}))
    plain, watched = (prepared(study_path, tmp_path, "1m-clm-20", callbacks=names) for names in ((), ("watching",)))
    assert end(plain) == end(watched)


def test_an_unknown_callback_and_an_unknown_metric_are_refused(study_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown callback 'fadet'"):
        Recipe(callbacks=("fadet",))
    mlmclm.register("callback", "asking", type("Asking", (Faded,), {"asks": ("gradient_nrm",)}))
    job: Any = type("Job", (), {"recipe": Recipe(callbacks=("asking",))})
    with pytest.raises(
        UserError, match=r"callback 'asking': unknown metric 'gradient_nrm'\. Did you mean 'gradient_norm'"
    ):
        added_kinds(job)


def test_a_callback_that_weights_may_depend_on_asks_for_nothing_that_is_another_number_at_each_run() -> None:
    for observes in (False, True):
        kind = type("Hurried", (Faded,), {"asks": ("tokens_per_second",), "observes": observes})
        mlmclm.register("callback", "hurried", kind)
        job: Any = type("Job", (), {"recipe": Recipe(callbacks=("hurried",))})
        with (
            nullcontext()
            if observes
            else pytest.raises(UserError, match=r"'hurried': tokens_per_second differs from run to run")
        ):
            assert added_kinds(job) == {"hurried": kind}


@pytest.mark.slow
def test_states_that_studies_with_other_models_share_have_the_same_weights_under_a_callback_that_averages(
    session: None, study_path: Path, tmp_path: Path
) -> None:
    mlmclm.register("callback", "averaged", Averaged)
    studies = {"one": ("1m-clm-20",), "other": ("1m-clm-20", "1m-clm-13-mlm40-20", "1m-clm-18")}
    states_of = {}
    for name, models in studies.items():
        made = prepared(study_path, tmp_path / name, *models, callbacks=("averaged",), decay_steps=4, warmup_steps=2)
        train_missing_stages(made)
        states_of[name] = {state.key(made.fingerprint) for stage in made.plan.stages for state in stage.states}
    (shared,) = states_of["one"] & states_of["other"]
    one, other = (load_file(states.state_folder(tmp_path / name, shared) / "state.safetensors") for name in studies)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_without_a_callback_s_has_the_files_that_it_had(tmp_path: Path) -> None:
    state = TrainingState(3, {"weight": torch.ones(2)}, {}, {})
    for name, callbacks in (("none", {}), ("some", {"mine": {"tensor": torch.zeros(2), "number": 0.1}})):
        (tmp_path / name).mkdir()
        write_tensors(tmp_path / name, TrainingState(state.step, state.weights, {}, {}, callbacks))
    assert {file.name for file in (tmp_path / "none").iterdir()} == {"state.safetensors", "step.json"}
    found = read_tensors(tmp_path / "some")
    assert found.callbacks["mine"]["number"] == 0.1 and torch.equal(found.callbacks["mine"]["tensor"], torch.zeros(2))
    assert dict(found.weights).keys() == {"weight"} and read_tensors(tmp_path / "none").callbacks == {}
