"""A grid under the name of an earlier one: growing is silent, anything else asks for a decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.storage.checksums import write_sealed
from mlmclm.studies.study_record import FILE, check_last
from mlmclm.sweeps.grid import grid_difference, grid_of
from mlmclm.sweeps.space import Space

VALUES: dict[str, Any] = {
    "tasks": ["sst2", "rte", "mnli"],
    "learning_rates": [1e-4, 1e-3],
    "seeds": [0, {"head": 0, "order": 1, "dropout": 0}],
    "protocol": {"max_steps": 5},
    "grid": {"weight_decay": [0.0, 0.1]},
    "per_model": {"a": {"batch_size": 8}},
}
MODELS = {"a": "weights of a", "b": "weights of b"}


def grid(models: dict[str, str] = MODELS, **changes: Any) -> dict[str, Any]:
    return grid_of(parse_config(Space, {**VALUES, **changes}, where="space"), models)


def remember(folder: Path, now: dict[str, Any]) -> None:
    write_sealed(folder / FILE, {"grid": now})


@pytest.mark.parametrize(
    ("now", "added"),
    [
        (grid(), ()),
        (grid(metrics="study", rule="per_seed", max_concurrent=1, cpus_per_cell=2), ()),
        (grid({**MODELS, "c": "weights of c"}), ("model added: c",)),
        (grid(tasks=["cola", *VALUES["tasks"]]), ("task added: cola",)),
        (grid(learning_rates=[1e-3, 2e-4, 1e-4]), ("learning rate added: 0.0002",)),
        (
            grid(learning_rates={"values": [1e-4, 1e-3], "extend": True}),
            ("up to 3 learning rates added at each end (was no learning rates added)",),
        ),
        (grid(seeds=[*VALUES["seeds"], 3]), ("seed added: 3",)),
        (grid(per_model={**VALUES["per_model"], "c": {"batch_size": 1}}), ()),
        (grid(task_grids={"rte": {"weight_decay": [0.1, 0.0, 0.2]}}), ("setting of rte added: weight decay 0.2",)),
    ],
)
def test_a_grid_that_grew_loses_nothing(now: dict[str, Any], added: tuple[str, ...]) -> None:
    found = grid_difference(grid(), now)
    assert (found.added, found.lost) == (added, ())


@pytest.mark.parametrize(
    ("now", "lost"),
    [
        (grid({"b": MODELS["b"]}), ("model left out: a",)),
        (grid({**MODELS, "b": "others"}), ("b: other weights",)),
        (grid(tasks=["rte", "mnli"]), ("task left out: sst2",)),
        (grid(learning_rates=[1e-4, 2e-3]), ("learning rate left out: 0.001",)),
        (grid(seeds=[0, 1]), ("seed left out: {'head': 0, 'order': 1, 'dropout': 0}",)),
        (grid(protocol={"max_steps": 6}), ("sst2, rte, mnli: max_steps 6 (was 5)",)),
        (grid(per_task={"rte": {"batch_size": 4}}), ("rte: batch_size 4 (was as by default)",)),
        (grid(per_model={"a": {"batch_size": 16}}), ("a: batch_size 16 (was 8)",)),
        (grid(per_model={}), ("a: batch_size as by default (was 8)",)),
        (grid(start_from={"rte": "mnli"}), ("rte: start_from mnli (was None)",)),
        (grid(grid={"weight_decay": [0.1]}), tuple(f"setting of {task} left out: weight decay 0" for task in VALUES["tasks"])),
    ],
)  # fmt: skip
def test_what_a_grid_lacks_or_changes_is_named(now: dict[str, Any], lost: tuple[str, ...]) -> None:
    assert grid_difference(grid(), now).lost == lost


def test_rates_that_are_no_longer_added_are_lost() -> None:
    before = grid(learning_rates={"values": [1e-4, 1e-3], "extend": 2})
    assert grid_difference(before, grid()).lost == (
        "no learning rates added (was up to 2 learning rates added at each end)",
    )
    assert grid_difference(before, before) == grid_difference(grid(), grid())
    assert "extend" not in grid(), "records of grids without it stay as they are"


def test_the_user_decides_by_a_name_or_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "studies" / "mine"
    folder.mkdir(parents=True)
    check_last(folder, grid(), replace=False)  # nothing is there yet
    remember(folder, grid())
    check_last(folder, grid(), replace=False)
    assert capsys.readouterr().err == ""
    check_last(folder, grid(tasks=[*VALUES["tasks"], "cola"]), replace=False)
    assert "mine: the grid has grown: task added: cola" in capsys.readouterr().err
    changed = grid(tasks=["rte", "mnli", "cola"])
    with pytest.raises(UserError) as caught:
        check_last(folder, changed, replace=False)
    for part in ("name 'mine'", "task left out: sst2", "task added: cola", "--name", "--replace"):
        assert part in str(caught.value)
    check_last(folder, changed, replace=True)
    remember(folder, changed)
    check_last(folder, changed, replace=False)


def test_a_damaged_record_is_named_and_replaced_only_if_the_user_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit that leaves valid JSON passed for another grid."""
    remember(tmp_path, grid())
    file = tmp_path / FILE
    file.write_text(file.read_text().replace("sst2", "sst3"))
    with pytest.raises(UserError, match=r"run\.json: damaged \(its checksum differs.*Delete it, or run with --replace"):
        check_last(tmp_path, grid(), replace=False)
    check_last(tmp_path, grid(), replace=True)
    assert "It is written anew" in capsys.readouterr().err
    remember(tmp_path, grid())
    check_last(tmp_path, grid(), replace=False)
