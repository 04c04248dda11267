"""A cell that code of one's own computes is filed under the key that it was planned with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import mlmclm
from mlmclm.backends.device_kinds import BACKEND
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.evaluation.evaluations import Subject, evaluation_key
from mlmclm.evaluation.language_model import scoring_of
from mlmclm.evaluation.zero_shot_config import ZeroShot
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import weights_hash
from mlmclm.plans.recipe import Recipe
from mlmclm.registry import KINDS
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.results_store import Evaluations
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.sweeps.zero_shot import evaluate_missing
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_pronoun_model, save_small_model, write_sentiment

pytestmark = pytest.mark.usefixtures("registers")

TEMPLATES = """occupation(0)\tother-participant(1)\tanswer\tsentence
baker\tguest\t0\tThe $OCCUPATION told the $PARTICIPANT that $NOM_PRONOUN was late.
"""
CODE = """
import torch
from mlmclm.backends.optimizers.optimizer import Optimizer
from mlmclm.backends.reference import Reference
from mlmclm.results.measures import WeightedMean
from mlmclm.tasks.metric import Metric


class Descent(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def slow(rate):
    class Slow(Optimizer):
        name = f"slow{rate}"

        @classmethod
        def build(cls, groups, settings):
            return Descent(groups, lr=0.0, momentum=rate / 10)

    return Slow


class Scaled(Metric):
    name = title = "scaled"
    family = "sequence-classification"

    @classmethod
    def measure(cls, columns, classes):
        from .helper import FACTOR
        return WeightedMean(FACTOR * columns["correct"].astype(float))


class Mine(Reference):
    name = "mine"
"""


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    (tmp_path / "own_code").mkdir()
    for name, text in (("__init__", ""), ("helper", "FACTOR = 0.5\n"), ("members", CODE)):
        (tmp_path / "own_code" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    members = importlib.import_module("own_code.members")
    mlmclm.register("metric", None, members.Scaled)
    mlmclm.register("backend", None, members.Mine)
    for rate in (1, 5):
        mlmclm.register("optimizer", None, members.slow(rate))
    keyed = KINDS["metric"].keyed("scaled")
    assert "own_code.helper" not in sys.modules
    write_sentiment(tmp_path / "data", train=80, test=30)
    folder = save_small_model(tmp_path / "model")
    protocol = Protocol(max_steps=3, max_length=48, stride=8, batch_size=8, optimizer="slow1")
    task = get_task("sst2").model_copy(update={"metric": "scaled"})
    data = prepare_task(task, folder, protocol, store=tmp_path / "store", data_root=tmp_path / "data").task_data
    # The metric's rehearsal has run it, and so loaded the helper.
    assert "own_code.helper" in sys.modules and KINDS["metric"].keyed("scaled") == keyed
    yield Cell("a", folder, weights_hash(folder), "sst2", data, protocol, 1e-3, 0, declaration=task)
    for name in [name for name in sys.modules if name.startswith("own_code")]:
        del sys.modules[name]


def test_an_optimizer_and_a_metric_of_one_s_own_leave_the_key_as_it_was_planned(cell: Cell, tmp_path: Path) -> None:
    planned, other = cell_key(cell), replace(cell, protocol=Protocol(**dict(cell.protocol) | {"optimizer": "slow5"}))
    assert cell_key(other) != planned
    result = run_cell(cell, store=tmp_path / "store", data_root=tmp_path / "data")
    assert result["key"] == planned == cell_key(cell)
    assert result["scores"]["test"]["scaled"] == pytest.approx(result["scores"]["test"]["accuracy"] / 2)


@pytest.mark.slow
def test_a_sweep_over_two_optimizers_of_one_s_own_files_and_finds_both(cell: Cell, tmp_path: Path) -> None:
    space = Space(
        tasks=("sst2",),
        learning_rates=(1e-3,),
        seeds=(0,),
        protocol=cell.protocol,
        grid={"optimizer": ("slow1", "slow5")},
    )
    cells = expand(
        space, [SweepModel("a", cell.model_folder, cell.weights)], {"sst2": cell.task_data}, {"sst2": cell.declared}
    )
    places = {"store": tmp_path / "store", "data_root": tmp_path / "data"}
    with ray_session(tmp_path / "ray", num_cpus=2):
        for computed in (2, 0):
            outcome = run_sweep(cells, SweepOptions(**places))
            outcome.check()
            assert [each["key"] for each in outcome.results] == [*map(cell_key, cells)]
            assert outcome.computed == computed


def test_a_backend_of_one_s_own_is_in_the_keys_of_what_it_computes_and_a_built_in_one_is_not(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BACKEND, raising=False)
    plain, recipe = cell_key(cell), Recipe().identity()
    for built_in in ("reference", "cpu", "nowhere"):
        monkeypatch.setenv(BACKEND, built_in)
        assert cell_key(cell) == plain and Recipe().identity() == recipe
    monkeypatch.setenv(BACKEND, "mine")
    assert cell_key(cell) != plain
    assert Recipe().identity() == recipe | {"backend": KINDS["backend"].keyed("mine")}


@pytest.mark.slow
def test_workers_of_zero_shot_evaluations_compute_with_a_backend_of_one_s_own(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND, "mine")
    (tmp_path / "wino").mkdir()
    (tmp_path / "wino" / "templates.tsv").write_text(TEMPLATES)
    (tmp_path / "wino" / "occupations-stats.tsv").write_text("occupation\tbls_pct_female\nbaker\t60.5\n")
    asked = ZeroShot(winogender=str(tmp_path / "wino"))
    (task,) = asked.read(None)
    subject = Subject.of("a", *scoring_of(save_pronoun_model(tmp_path / "pronouns")))
    with ray_session(tmp_path / "ray", num_cpus=1):
        evaluate_missing([(subject, task)], asked, store=tmp_path / "store", data_root=None, device="cpu", cpus=1)
    result = Evaluations(tmp_path / "store").find(evaluation_key(subject, task))
    assert result is not None and result["cost"]["backend"] == "mine"
