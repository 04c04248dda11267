"""The table of a sweep that a person watches: right numbers, whole names, and never more than the terminal holds."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mlmclm.finetuning.cell import Cell
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.table import SweepTable
from sweep_cells import make_cell, make_result

MODELS, TASKS, RATES, SEEDS = ("2m-clm-600", "2m-clm-150-mlm40-600"), ("sst2", "conll2003"), (1e-4, 1e-3), (0, 1)


def grid(models: tuple[str, ...] = MODELS, tasks: tuple[str, ...] = TASKS) -> list[Cell]:
    return [
        make_cell(model, task, rate, seed) for model in models for task in tasks for rate in RATES for seed in SEEDS
    ]


def result(cell: Cell, score: float | None) -> dict[str, Any]:
    made = make_result(cell, status="ok" if score is not None else "diverged")
    if score is not None:
        made["scores"] = {"validation": {"accuracy": score}, "test": {"accuracy": 0.0}}
    return made


def drawn(table: SweepTable, width: int = 120, height: int = 40) -> str:
    written = io.StringIO()
    Console(file=written, width=width, height=height, force_terminal=True, color_system=None).print(table)
    return written.getvalue()


def test_the_best_so_far_is_the_highest_mean_over_seeds_on_validation() -> None:
    cells = grid()
    table = SweepTable(cells)
    first = cells[:4]
    scores = (0.5, 0.7, 0.65, None)  # two seeds of 1e-4, then of 1e-3: 0.6 against 0.65
    for cell, score in zip(first, scores, strict=True):
        table.started(cell, "worker 1")
        line = table.add(result(cell, score))
        table.stopped(cell)
    assert line == "2m-clm-600 on sst2: all 4 cells are done, best validation score 65.0 at 1e-3, 1 diverged"
    text = drawn(table)
    assert "4/4, 1 diverged" in text and "65.0 at 1e-3" in text
    assert text.count("0/4") == 3


def test_what_runs_is_named_and_what_failed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    cells = grid()
    table = SweepTable(cells)
    for number, cell in enumerate(cells[:6], start=1):
        table.started(cell, f"worker {number}")
    text = drawn(table)
    assert "0/4, 4 running" in text and "0/4, 2 running" in text
    assert "worker 1: 2m-clm-600/sst2/lr1e-4/s0, 0 s" in text and "and 2 more busy workers" in text
    table.stopped(cells[0], failed=True)
    assert "0/4, 3 running, 1 failed" in drawn(table)


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (120, 30), (300, 100)])
def test_it_fits_the_terminal_and_no_name_is_cut(width: int, height: int) -> None:
    models = tuple(f"610m-clm-{steps}k-mlm40-42k" for steps in range(1, 39))
    cells = grid(models, tuple(f"task-{number}" for number in range(15)))
    table = SweepTable(cells)
    busy = next(cell for cell in cells if cell.model == models[30])
    table.started(busy, "worker 1")
    lines = drawn(table, width, height).splitlines()
    assert len(lines) <= height - 3, "the bar needs room below"
    assert max(map(len, lines)) <= width
    shown = [line.split()[0] for line in lines if line.startswith("610m")]
    assert shown and set(shown) <= set(models) and models[30] in shown
    assert shown == sorted(shown, key=models.index)
    others = len(models) - len(shown)
    assert not others or any(line.startswith(f"and {others} more models: 0/") for line in lines)
    assert ("task-14" in "\n".join(lines)) == (width == 300)


def test_a_table_that_would_cut_a_name_gives_way_to_sums() -> None:
    cells = grid(MODELS, ("sst2", "conll2003", "pydocs-retrieval"))
    table = SweepTable(cells)
    for cell in cells:
        table.started(cell, "worker 1")
        table.add(result(cell, 0.5))
    widths = {width: drawn(table, width) for width in range(44, 140, 4)}
    for width, text in widths.items():
        assert "…" not in text, width
        assert all(model in text for model in MODELS), width
    assert "3 tasks" in widths[56] and "pydocs-retrieval" not in widths[56]
    assert "pydocs-retrieval" in widths[60] and "4/4, 4 running" not in widths[60], "counts alone"
    assert "4/4, 4 running" in widths[136] and "50.0 at" in widths[136]


def test_brackets_in_names_are_no_markup() -> None:
    assert "a[/x]b" in drawn(SweepTable([make_cell("a[/x]b", "[bold]")]))


def test_at_the_scale_of_the_published_grid_every_form_fits_and_the_sums_are_right() -> None:
    models, tasks = tuple(f"610m-clm-{steps}k-mlm40-42k" for steps in range(1, 43)), tuple(map(str, range(12)))
    cells = [make_cell(model, task, 1e-3, seed) for model in models for task in tasks for seed in range(10)]
    table = SweepTable(cells)
    for cell in cells[::2]:
        table.add(result(cell, 0.5 if cell.seed else None))
    for width, height in ((80, 24), (120, 40), (200, 60), (300, 100)):
        lines = drawn(table, width, height).splitlines()
        assert len(lines) <= height - 3 and max(map(len, lines)) <= width
        shown = sum(line.startswith("610m") for line in lines)
        more = [line for line in lines if line.startswith("and ")]
        assert more == ([] if shown == 42 else [
            f"and {42 - shown} more models: {60 * (42 - shown):,}/{120 * (42 - shown):,}, {12 * (42 - shown)} diverged"
        ])  # fmt: skip
        assert shown >= min(42, (height - 9) // 2)


def test_a_log_says_what_runs_while_no_cell_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlmclm.progress.SECONDS_BETWEEN_LINES", 0.0)
    # The bar's own thread may print a line of its own before or after any of these.
    monkeypatch.setattr("mlmclm.progress.Bar._say_that_work_goes_on", lambda _: None)
    written = io.StringIO()
    monkeypatch.setattr("mlmclm.progress.console", Console(file=written, width=200))
    monkeypatch.setattr("mlmclm.sweeps.sweep_progress.console", Console(file=written, width=200))
    cells = grid()
    progress = SweepProgress(cells, table=SweepTable(cells))
    monkeypatch.setattr("mlmclm.sweeps.sweep_progress.show", lambda *_, **labels: None)  # needs a Ray session
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    with progress.shown():
        progress.tick()
        progress.started(cells[0], "worker 1")
        progress.started(cells[1], "worker 2")
        progress.update()
    _, before, after = written.getvalue().splitlines()
    assert before == "fine-tuning: 0/16 cells, 0 s, workers are starting"
    assert after == "fine-tuning: 0/16 cells, 0 s, 2 running, 2m-clm-600/sst2/lr1e-4/s0 for 0 s"
