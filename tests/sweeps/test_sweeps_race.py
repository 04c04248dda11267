"""A sweep whose learning rates are raced: fewer cells, the same choice, and nothing is computed again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

import mlmclm.sweeps.run_layers
from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.race import asked_at, standing
from mlmclm.analysis.results import Grid
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.outcome import SweepOutcome
from mlmclm.sweeps.run_layers import run_layers
from mlmclm.sweeps.starts import Planned
from mlmclm.sweeps.sweep_options import SweepOptions
from sweep_cells import make_cell, make_result

RATES, SEEDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3), (0, 1, 2, 3, 4)
LEVELS = {"sst2": (0.5, 0.6, 0.8, 0.81, 0.7, 0.5), "rte": (0.50, 0.52, 0.54, 0.55, 0.60, 0.64)}


def score(cell: Cell) -> float:
    """A level for each rate, noise for each run, and an effect of the seed on all rates."""
    chance = random.Random(f"{cell.task} {cell.learning_rate} {cell.seed}")
    level = LEVELS[cell.task][RATES.index(cell.learning_rate)]
    return level + chance.gauss(0, 0.01) + random.Random(f"{cell.seed}").gauss(0, 0.05)


@pytest.fixture
def cells() -> list[Cell]:
    return [make_cell(task=task, learning_rate=rate, seed=seed) for task in LEVELS for rate in RATES for seed in SEEDS]


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Cell]]:
    """The missing cells of each round, which are computed at once; seed 3 at the best rate of rte diverges."""
    asked: list[list[Cell]] = []

    def run_here(cells: list[Cell], options: SweepOptions) -> SweepOutcome:
        ledger = Ledger(options.store)
        missing = ledger.missing(cells)
        if missing:
            asked.append(missing)
        for cell in missing:
            result = make_result(cell, status="diverged" if (cell.task, cell.seed) == ("rte", 3) else "ok")
            if result["status"] == "ok":
                result["scores"] = {split: {"accuracy": score(cell)} for split in ("validation", "test")}
            ledger.write(result)
        return SweepOutcome(ledger.results(cells), computed=len(missing), reused=len(cells) - len(missing))

    monkeypatch.setattr(mlmclm.sweeps.run_layers, "run_sweep", run_here)
    return asked


def test_a_race_chooses_what_the_whole_grid_would_with_fewer_cells(
    cells: list[Cell], rounds: list[list[Cell]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run_layers(lambda: Planned(cells), SweepOptions(store=tmp_path / "raced"), race=asked_at(0.05))
    assert [len(each) for each in rounds][:2] == [12, 6], "all rates with one seed, the better half with the second"
    assert outcome.computed == len(outcome.results) == sum(map(len, rounds)) < 0.75 * len(cells)
    keys = [cell_key(cell) for each in rounds for cell in each]
    assert len(set(keys)) == len(keys)
    assert f"race: {outcome.computed} of {len(cells)} cells have results" in capfd.readouterr().err
    whole = run_layers(lambda: Planned(cells), SweepOptions(store=tmp_path / "whole"))
    for task in LEVELS:
        means = {
            rate: mean(score(cell) for cell in cells if (cell.task, cell.learning_rate) == (task, rate))
            for rate in RATES
        }
        best = max(means, key=lambda rate: means[rate])
        for results, race in ((outcome.results, 0.05), (whole.results, None)):
            grid = Grid(("a",), tuple(LEVELS), RATES, SEEDS, race=race)
            made = analyse(results, None, grid=grid, rule="mean")
            row = made.best[made.best["task"] == task].iloc[0]
            # The whole grid of rte lost a seed at every rate, so its means are over four; the levels are far apart.
            assert row["learning_rate"] == best
            assert made.missing == 0 and made.cut == len(cells) - len(results)


def test_a_race_goes_on_where_it_was_and_computes_nothing_again(
    cells: list[Cell], rounds: list[list[Cell]], tmp_path: Path
) -> None:
    first = run_layers(lambda: Planned(cells), SweepOptions(store=tmp_path), race=asked_at(0.05))
    rounds.clear()
    again = run_layers(lambda: Planned(cells), SweepOptions(store=tmp_path), race=asked_at(0.05))
    assert rounds == [] and (again.computed, again.reused) == (0, first.computed)
    ledger = Ledger(tmp_path)
    lost = next(result for result in first.results if result["task"] == "sst2")
    ledger.path(lost["key"]).unlink()
    assert run_layers(lambda: Planned(cells), SweepOptions(store=tmp_path), race=asked_at(0.05)).computed == 1
    for task in LEVELS:
        scores = {
            (cell.learning_rate, cell.seed): (result["scores"] or {}).get("validation", {}).get("accuracy")
            for cell in cells
            if cell.task == task and (result := ledger.find(cell_key(cell))) is not None
        }
        assert standing(scores, RATES, SEEDS, 0.05).asked == ()


def test_a_failed_cell_ends_the_race_of_its_model_and_task_only(
    cells: list[Cell], rounds: list[list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mlmclm.sweeps.run_layers.run_sweep

    def fail(cells: list[Cell], options: SweepOptions) -> SweepOutcome:
        failed = [cell for cell in cells if (cell.task, cell.learning_rate) == ("rte", 1e-3)]
        outcome = whole([cell for cell in cells if cell not in failed], options)
        return replace(outcome, failed=[(cell, RuntimeError("broke")) for cell in failed])

    monkeypatch.setattr(mlmclm.sweeps.run_layers, "run_sweep", fail)
    outcome = run_layers(lambda: Planned(cells), SweepOptions(store=tmp_path), race=asked_at(0.05))
    assert [cell.seed for cell, _ in outcome.failed] == [0]
    assert len(rounds) > 2 and {cell.task for cell in rounds[1]} == {"sst2"}
    scores = {
        (result["learning_rate"], result["seed"]): result["scores"]["validation"]["accuracy"]
        for result in outcome.results
        if result["task"] == "sst2"
    }
    assert standing(scores, RATES, SEEDS, 0.05).asked == ()
