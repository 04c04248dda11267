"""A worker of a sweep computes what it is given, knows where it cannot, and says how it fares."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlmclm.cluster import key_values
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.sweeps import heartbeats
from mlmclm.sweeps.heartbeats import Heartbeat, beating, heard
from mlmclm.sweeps.trainable import COMPUTED, ENVIRONMENT_FAULT
from sweep_cells import FakeWorker, make_cells


def test_a_worker_prepares_the_models_that_it_computes_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Path] = []
    monkeypatch.setattr("mlmclm.sweeps.trainable.setproctitle", lambda title: None)
    monkeypatch.setattr(
        "mlmclm.sweeps.trainable.shapes_of", lambda cells: prepared.extend(c.model_folder for c in cells)
    )
    monkeypatch.setattr("mlmclm.sweeps.trainable.prepare", lambda *args: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    worker = object.__new__(FakeWorker)  # without Tune's own set-up
    worker.setup({"resources": {}}, store=tmp_path, seen=tmp_path)
    cells = [replace(cell, model_folder=tmp_path / name) for cell, name in zip(make_cells(3), "aab", strict=True)]
    for cell in cells:
        worker.take({cell_key(cell): cell})
        assert worker.step()["outcome"] == COMPUTED
    assert prepared == [tmp_path / "a", tmp_path / "b"]


def test_a_worker_that_does_not_see_the_store_says_so_and_computes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.sweeps.trainable.setproctitle", lambda title: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    (cell,) = make_cells(1)
    worker = object.__new__(FakeWorker)  # without Tune's own set-up
    worker.setup({"resources": {}}, store=tmp_path, seen=tmp_path / "only the driver's node has this")
    worker.take({cell_key(cell): cell})
    found = worker.step()
    assert found["outcome"] == ENVIRONMENT_FAULT and "must be on a file system that all nodes" in found["message"]
    assert not list(tmp_path.iterdir())


class Asked(FakeWorker):
    """Notes what its heartbeat says while it computes."""

    def compute(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        time.sleep(0.02)
        self.heartbeat = self._heartbeat()
        return super().compute(cells)


def test_a_worker_that_waits_for_its_driver_uses_none_of_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.sweeps.trainable.setproctitle", lambda title: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    cells = {cell_key(cell): cell for cell in make_cells(2)}
    worker = object.__new__(Asked)  # without Tune's own set-up
    worker.setup({"resources": {}}, store=tmp_path, seen=tmp_path)
    for key, cell in cells.items():
        worker.take({key: cell})
        assert worker.step()["outcome"] == COMPUTED and worker.heartbeat.lost == 0.0
        before = worker._heartbeat().lost
        time.sleep(0.02)
        assert worker._heartbeat().lost >= before + 0.02


def test_a_worker_sends_heartbeats_while_it_computes_and_none_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[bytes, bytes] = {}
    monkeypatch.setattr(heartbeats, "SECONDS_BETWEEN_BEATS", 0.01)
    monkeypatch.setattr(key_values, "put", sent.__setitem__)
    monkeypatch.setattr(key_values, "get_all", lambda prefix: dict(sent))
    monkeypatch.setattr(
        key_values, "delete", lambda prefix: [sent.pop(key) for key in list(sent) if key.startswith(prefix)]
    )
    with heard("sweep") as driver:
        with beating("sweep", "worker 3", lambda: Heartbeat(2.5, "waiting")):
            marks = set[str]()
            while len(marks) < 3:
                driver.look()
                heartbeat, _ = driver.latest("worker 3")
                marks.add(heartbeat.mark)
                assert heartbeat[:2] == (2.5, "waiting")
        time.sleep(0.05)
        assert sent == {}, "or the driver would read it for as long as the sweep runs"
        assert driver.latest("worker 3")[0].mark in marks
        sent[b"heartbeat:sweep:worker 4"] = b"of a worker that was killed"
    assert sent == {}
