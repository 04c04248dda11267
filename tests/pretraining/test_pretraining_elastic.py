"""Pretraining that goes on with fewer workers when a node is lost, and with more when another has come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster as Raylets
from small_training import prepared

from mlmclm.cluster.ray_cluster import prepare_environment
from mlmclm.pretraining import states
from mlmclm.studies.work import train_missing_stages
from ray_nodes import head_with_nodes
from small_study import write_study

MODEL, STEPS, LOST, LAST_ALONE = "1m-mlm40-60", 60, 15, 20
"""Steps of two workers until a node is lost, and of a single one until it waits for the second."""


@pytest.fixture
def raylets(tmp_path: Path) -> Iterator[Raylets]:
    """A session on a head without CPUs, to which nodes can be added."""
    prepare_environment()
    with head_with_nodes(tmp_path / "ray", num_cpus=0) as raylets:
        yield raylets


def noting_the_number_of_workers(folder: Path) -> Callable[[dict[str, Any]], None]:
    """Return a worker's function that adds the number of workers of each step to a file in the folder."""

    def run(config: dict[str, Any]) -> None:
        import time

        from mlmclm.launches.worker_entry import run_in_worker
        from mlmclm.pretraining.engine import Engine

        taken, step = [0], Engine.step

        def noted(engine: Any, *given: Any, **named: Any) -> Any:
            with (folder / f"steps-{engine.rank}").open("a", encoding="utf-8") as lines:
                lines.write(f"{engine.world}\n")
            taken[0] += 1
            if engine.world == 1 and taken[0] > LAST_ALONE:
                time.sleep(300)  # ended by the restart with two workers, or this test fails at its last line
            return step(engine, *given, **named)

        Engine.step = noted  # type: ignore[method-assign]
        try:
            run_in_worker(config)
        finally:
            Engine.step = step  # type: ignore[method-assign]

    return run


@pytest.mark.slow
def test_a_stage_goes_on_with_one_worker_when_a_node_is_lost_and_with_two_when_one_has_come(
    raylets: Raylets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = {"source": "prose", "text_documents": "paragraph", "validation_fraction": 0.1, "workers": "local"}
    (tmp_path / "study").mkdir()
    study = write_study(tmp_path / "study", corpus=corpus)
    alone = prepared(study, tmp_path / "alone", MODEL)
    nodes = [raylets.add_node(wait=True, num_cpus=1) for _ in range(2)]
    train_missing_stages(alone)

    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setattr("mlmclm.launches.run_stage.run_in_worker", noting_the_number_of_workers(notes))
    monkeypatch.setattr("mlmclm.launches.run_stage.SECONDS_BETWEEN_RESIZES", 3.0)
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")  # is restored behind the test
    monkeypatch.setattr("mlmclm.launches.run_stage.ELASTIC_START_LIMIT", 20.0)
    elastic = prepared(study, tmp_path / "elastic", MODEL, fewest_workers=1)
    assert elastic.fingerprint == alone.fingerprint, "the number of workers is no part of a state's key"

    def noted() -> list[str]:
        file = notes / "steps-0"
        return file.read_text(encoding="utf-8").split() if file.is_file() else []

    def lose_and_add() -> None:
        deadline = time.monotonic() + 300
        while noted().count("2") < LOST and time.monotonic() < deadline:
            time.sleep(0.02)
        raylets.remove_node(nodes.pop(), allow_graceful=False)
        while "1" not in noted() and time.monotonic() < deadline:
            time.sleep(0.02)
        nodes.append(raylets.add_node(wait=True, num_cpus=1))

    thread = threading.Thread(target=lose_and_add)
    thread.start()
    try:
        train_missing_stages(elastic)
    finally:
        thread.join()
        for node in nodes:
            raylets.remove_node(node)
    workers = noted()
    changes = [number for place, number in enumerate(workers) if place == 0 or workers[place - 1] != number]
    assert changes == ["2", "1", "2"]
    curves = []
    for made in (alone, elastic):
        rows = states.curve(made.place.store, made.plan.targets[0].key(made.fingerprint))
        curves.append([row["loss"] for row in rows if "loss" in row])
    assert len(curves[1]) == STEPS
    assert curves[1] == pytest.approx(curves[0], rel=1e-3), "sums of two workers are rounded differently"
