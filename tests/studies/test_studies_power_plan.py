"""The power of a planned grid: stated, from results in the store, or not known yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

import mlmclm
import mlmclm.sweeps.estimate
import mlmclm.sweeps.run_sweep
from mlmclm.analysis.comparison import ALL_TASKS
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.seeds import Seeds
from mlmclm.storage.place import EXAMPLES
from mlmclm.studies.study import Study
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.studies.work import compute_missing as compute_sweep
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.sweep_options import SweepOptions, SweepOutcome
from small_models import save_small_model, write_entities, write_sentiment
from sweep_cells import make_result

NOISE = {"sst2": 0.004, "conll2003": 0.012}
SPACE: dict[str, Any] = {
    "tasks": ["sst2", "conll2003"],
    "learning_rates": [1e-3, 2e-3],
    "seeds": [0, 1, 2],
    "protocol": {"base": "standard", "batch_size": 8, "max_steps": 3, "max_length": 48},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of two tasks, two models, and a store in which the tasks are prepared."""
    folder = tmp_path_factory.mktemp("power")
    write_sentiment(folder / "data", train=60, test=20)
    write_entities(folder / "data", train=60, test=20)
    for name, seed in (("a", 0), ("b", 1)):
        save_small_model(folder / name, seed=seed)
    swept(folder, folder / "store")
    return folder


def study(folder: Path, store: Path, *, models: str = "ab", name: str = "mine", **changes: Any) -> Study:
    values = {**SPACE, **changes}
    return mlmclm.sweep(
        [str(folder / each) for each in models], None, values, name=name, store=store, data=folder / "data"
    )


def swept(folder: Path, store: Path, **changes: Any) -> StudySweep:
    return study(folder, store, **changes).sweep(prepare=True)


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Path:
    """A store without results in which the tasks are prepared."""
    (tmp_path / "store").mkdir()
    for part in (folder / "store").iterdir():
        if part.name not in ("cells", "studies", "claims"):
            (tmp_path / "store" / part.name).symlink_to(part)
    return tmp_path / "store"


def planted(cell: Cell, wide: float = 1.0) -> dict[str, Any]:
    """Return a cell's result with planted noise, so many times as large as elsewhere."""
    metric, shift = cell.declared.metric, int(cell.learning_rate > 1e-3)
    centre = 0.7 - 6 * NOISE[cell.task] * shift
    # Any three seeds in a row have exactly this deviation; rates and splits do not go together.
    steps = [(Seeds.of(cell.seed).head + shift + split) % 3 - 1 for split in (0, 1)]
    values = [centre + wide * NOISE[cell.task] * step for step in steps]
    scores = {split: {metric: value} for split, value in zip(("validation", "test"), values, strict=True)}
    return make_result(cell) | {"metric": metric, "scores": scores, "protocol": cell.identity()}


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Callable[[StudySweep], list[list[Cell]]]:
    """Compute a sweep's cells with scores of planted noise, and return the missing cells of each round."""
    asked: list[list[Cell]] = []

    def run_here(cells: list[Cell], options: SweepOptions) -> SweepOutcome:
        results_store = ResultsStore(options.store)
        missing = results_store.missing(cells)
        asked.extend([missing] if missing else [])
        for cell in missing:
            results_store.write(planted(cell))
        return SweepOutcome(results_store.results(cells), computed=len(missing), reused=len(cells) - len(missing))

    def run(sweep: StudySweep) -> list[list[Cell]]:
        asked.clear()
        compute_sweep(sweep, None)  # type: ignore[arg-type]  # no Ray
        return list(asked)

    monkeypatch.setattr(mlmclm.sweeps.run_sweep, "run_sweep", run_here)
    return run


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the estimate of the time, for which steps are trained."""

    def refuse(*cells: Any, **options: Any) -> None:
        raise UserError("not measured here")

    monkeypatch.setattr(mlmclm.sweeps.estimate, "estimate_time", refuse)


def test_stated_noise_is_all_that_the_plan_rests_on(folder: Path, store: Path) -> None:
    noise = {"sst2": {"seeds": 0.25}, "conll2003": {"seeds": 0.05, "test_set": 1.25}}
    plan = study(folder, store, noise=noise).plan()
    lines = str(plan).splitlines()
    assert (
        "noise, stated in the search space: sst2 0.2 points a seed; conll2003 0.1 points a seed and 1.2 by the test set"
        in lines
    )
    assert "0.5 points at 80 % power takes 6 seeds on sst2" in lines
    assert any(
        line.startswith("0.5 points takes larger test sets: with any number of seeds, these show at best ")
        for line in lines
    )
    assert any(line.startswith("with 3 seeds you will see ") for line in lines)
    assert plan.sweep is not None
    power = plan.as_dict()["power"]
    assert power["seeds_needed"] == {"sst2": 6, "conll2003": None} and power["noise_unknown"] == []
    assert set(power["smallest_differences"]) == {"sst2", "conll2003", ALL_TASKS}


def test_a_plan_says_what_earlier_results_show_and_where_they_are(
    folder: Path, store: Path, compute: Callable[[StudySweep], list[list[Cell]]]
) -> None:
    new = study(folder, store, name="new", seeds=[10, 11])
    assert (
        "nothing is known yet of the noise of sst2 and conll2003: run with 3 seeds first, or state it under `noise` in the search space"
        in str(new.plan()).splitlines()
    )
    compute(swept(folder, store, name="before", seeds=[0, 1, 2, 3], tasks=["conll2003"]))
    text = str(new.plan())
    assert "noise, from 16 runs of 2 models in before: conll2003 1." in text
    assert "with 2 seeds you will see " in text and "0.5 points at 80 % power takes " in text
    assert "nothing is known yet of the noise of sst2:" in text and "mean over tasks" not in text
    own = str(study(folder, store, name="again", seeds=[0, 1]).plan())
    assert "noise, from 8 runs of 2 models of this sweep: conll2003 1." in own
    # Results by another protocol or at other rates say nothing of this one's.
    other = study(folder, store, name="other", seeds=[0, 1], protocol={**SPACE["protocol"], "batch_size": 4})
    assert "nothing is known yet of the noise of sst2 and conll2003" in str(other.plan())


def test_a_finished_grid_s_plan_says_the_differences_that_its_report_says(folder: Path, store: Path) -> None:
    """A plan takes all models for equally noisy, and promised a third less than such results show."""
    sweep, results_store = swept(folder, store), ResultsStore(store)
    cells = sweep.plan().cells
    for cell in cells:
        results_store.write(planted(cell, wide=9.0 if (cell.model, cell.learning_rate) == ("a", 1e-3) else 1.0))
    report = sweep.setting().analyse(results_store.results(cells), results_store).smallest
    plan = study(folder, store).plan()
    assert plan.as_dict()["power"]["smallest_differences"] == {name: 100 * value for name, value in report.items()}
    assert f"with 3 seeds its results can show {100 * report['sst2']:.1f} points on sst2" in str(plan)
    assert "with 4 seeds you will see " in str(study(folder, store, seeds=[0, 1, 2, 3]).plan())


def test_one_model_has_no_difference_to_find(folder: Path, store: Path) -> None:
    assert "you will see" not in str(study(folder, store, models="a", seeds=[0, 1]).plan())


def test_a_plan_with_replicates_has_the_noise_of_pretraining(tmp_path: Path) -> None:
    values = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text()) | {
        "models": ["1m-clm-1k", "1m-mlm40-1k"],
        "baseline": None,
        "seeds": [0, 1, 2],
        "replicates": 3,
    }
    space = {**SPACE, "seeds": [0, 1, 2], "tasks": ["sst2"], "learning_rates": [1e-3]}

    def planned(noise: dict[str, float]) -> tuple[str, dict[str, Any]]:
        own = values | {"space": space | {"noise": {"sst2": noise}}}
        plan = mlmclm.study(own, store=tmp_path / "store").plan()
        return str(plan), plan.as_dict()["power"]

    text, power = planned({"seeds": 1.0, "pretraining": 3.0})
    assert "noise, stated in the search space: sst2 1.0 points a seed and 3.0 a pretraining run" in text
    assert "with 3 seeds and 3 pretraining runs of each model you will see " in text
    level, variance = 0.05, 2 * (0.03**2 + 0.01**2 / 3) / 3
    found = power["smallest_differences"]["sst2"] / 100
    assert stats.nct.sf(stats.t.ppf(1 - level / 2, 4), 4, found / math.sqrt(variance)) == pytest.approx(0.8, abs=1e-3)
    assert power["pretraining_runs"] == 3 and power["pretraining_runs_needed"]["sst2"] > 100

    text, power = planned({"seeds": 1.0})
    assert (
        "nothing is known yet of the noise of pretraining on sst2, so what follows is about single pretraining runs"
        in text
    )
    assert power["pretraining_runs"] == 1


def test_earlier_results_show_the_noise_of_pretraining(
    folder: Path, store: Path, compute: Callable[[StudySweep], list[list[Cell]]]
) -> None:
    named = {name: str(folder / place) for name, place in (("1m-clm-1k", "a"), ("1m-clm-1k-r2", "b"))}
    before = mlmclm.sweep(named, None, {**SPACE, "seeds": [0, 1]}, name="before", store=store, data=folder / "data")
    compute(before.sweep(prepare=True))
    plan = study(folder, store, name="new", seeds=[10, 11]).plan()
    assert "noise, from 8 runs of 1 model in before: sst2 0." in str(plan) and "claims" not in str(plan)
    known = plan.as_dict()["power"]["noise"]["conll2003"]
    # Both runs have the same planted scores.
    assert known["pretraining"] == 0 and known["together"] == 1 and known["models"] == 1
