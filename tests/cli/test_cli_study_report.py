"""The printed results of a study name each number."""

from __future__ import annotations

import pytest

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import records
from mlmclm.cli.output import show_best
from small_results import make_result


def test_the_table_has_the_plain_mean_the_score_and_that_of_a_fresh_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal scores of the seeds at a rate that validation chose by luck: the two numbers differ by points."""
    draws = {1e-4: (0.60, 0.60), 3e-4: (0.61, 0.52), 1e-3: (0.55, 0.63)}
    made = [
        make_result(
            key=f"{len(draws) * seed + place:064x}",
            model="a",
            seed=seed,
            learning_rate=rate,
            scores={
                split: {"accuracy": values[(seed + shift) % 2]} for shift, split in enumerate(("validation", "test"))
            },
        )
        for place, (rate, values) in enumerate(draws.items())
        for seed in (0, 1)
    ]
    found = analyse(made)
    (row,) = records(found.best)
    assert row["test_mean"] == row["score"] and abs(row["fresh"] - row["score"]) > 1e-4
    show_best(found)
    said = capsys.readouterr().out
    assert "mean test" in said and "score [95 %]" in said and "fresh run [95 %]" in said
    (line,) = (line for line in said.splitlines() if "sst2" in line)
    numbers = [part.strip().partition(" ")[0] for part in line.split("│")]
    assert f"{100 * row['test_mean']:.2f}" in numbers and f"{100 * row['fresh']:.2f}" in numbers
