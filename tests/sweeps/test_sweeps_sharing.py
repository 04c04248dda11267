"""The calibration of how many cells share a GPU, measured here on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.sweeps import sharing
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.sharing import cells_beside_each_other, heaviest, most_useful
from mlmclm.sweeps.space import Space
from sweep_cells import make_cells

Rates = Callable[[int], float | None]


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ([10.0, 19.0, 25.0, 25.5], 3),  # the fourth gains 2 %
        ([10.0, 10.5, 30.0], 1),
        ([10.0, 19.0, None], 2),  # the third runs out of memory
        ([10.0 * 1.2**count for count in range(16)], 16),
    ],
)
def test_cells_are_added_while_all_together_get_faster(rates: list[float | None], found: int) -> None:
    asked = []

    def rate_of(count: int) -> float | None:
        asked.append(count)
        return rates[count - 1] if count <= len(rates) else 0.0

    assert most_useful(rate_of) == found
    assert asked == list(range(1, len(asked) + 1))


def test_the_cell_of_the_largest_weights_and_batches_is_measured(tmp_path: Path) -> None:
    cells = make_cells(3)
    for index, size in enumerate((10, 1000, 100)):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(size))
        cells[index] = replace(cells[index], model_folder=folder)
    assert heaviest(cells) == cells[1]
    wide = cells[2].protocol.model_copy(update={"batch_size": 100 * cells[2].protocol.batch_size})
    assert heaviest([*cells, replace(cells[2], protocol=wide)]).protocol == wide


def test_real_processes_are_measured_once(
    real_cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MOST_CELLS", 2)
    options: dict[str, Any] = {"store": tmp_path, "data_root": tmp_path / "data", "device": "this machine"}
    # Evaluations would end the measurement: at its learning rate no score is better than the first.
    stops = real_cells[0].protocol.model_copy(update={"evaluate_every": 1, "patience": 1})
    cell = replace(real_cells[0], protocol=stops)
    found = cells_beside_each_other(cell, **options)
    (kept,) = (tmp_path / "calibrations").glob("*.json")
    value = json.loads(kept.read_text())
    assert value["cells"] == found
    one, two = value["steps_a_second"]
    assert one > 0 and two > 0
    assert found == (2 if two >= sharing.LEAST_GAIN * one else 1)
    monkeypatch.setattr(sharing.subprocess, "Popen", lambda *args, **options: pytest.fail("measured again"))
    assert cells_beside_each_other(cell, **options) == found


def test_a_cell_that_cannot_be_trained_alone_is_an_error_and_nothing_is_kept(
    real_cells: list[Cell], tmp_path: Path
) -> None:
    gone = replace(real_cells[0], model_folder=tmp_path / "nowhere")
    with pytest.raises(EnvironmentFault, match=r"a process that trained it alone.*has exited"):
        cells_beside_each_other(gone, store=tmp_path, data_root=tmp_path / "data", device="this machine")
    assert not (tmp_path / "calibrations").exists()


def test_a_second_process_that_dies_counts_as_too_many(
    real_cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = sharing.subprocess.Popen, []

    def first_only(words: list[str], **options: Any) -> Any:
        started.append(words)
        return real(words if len(started) == 1 else [words[0], "-c", "raise SystemExit(1)"], **options)

    monkeypatch.setattr(sharing.subprocess, "Popen", first_only)
    assert (
        cells_beside_each_other(real_cells[0], store=tmp_path, data_root=tmp_path / "data", device="this machine") == 1
    )
    assert len(started) == 2


def test_a_gpu_that_torch_does_not_see_ends_the_sweep(real_cells: list[Cell], tmp_path: Path) -> None:
    with (
        ray_session(tmp_path, num_cpus=1, num_gpus=1),
        pytest.raises(EnvironmentFault, match="offers Ray a GPU, but torch sees none"),
    ):
        run_sweep(real_cells, store=tmp_path, data_root=tmp_path / "data", gpus_per_cell="shared", device="cuda")


@pytest.mark.slow
def test_a_cluster_without_a_gpu_is_refused_at_once(real_cells: list[Cell], tmp_path: Path) -> None:
    with ray_session(tmp_path, num_cpus=1), pytest.raises(UserError, match="gpus_per_cell: 0"):
        run_sweep(real_cells, store=tmp_path, data_root=tmp_path / "data", gpus_per_cell="shared", device="cuda")


def test_a_space_may_say_shared() -> None:
    values: dict[str, Any] = {"tasks": ("sst2",), "learning_rates": (1e-4,), "seeds": (0,), "protocol": "standard"}
    assert Space(**values, gpus_per_cell="shared").gpus_per_cell == "shared"
    with pytest.raises((UserError, ValueError), match="shared"):
        Space(**values, gpus_per_cell="share")
