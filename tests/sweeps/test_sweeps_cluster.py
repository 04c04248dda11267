"""Sweeps on a cluster that is not theirs alone: nodes come and go, and others want workers too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster as Raylets

from mlmclm.cluster import cluster as service_cluster
from mlmclm.cluster.placement import Cluster, Growth, NodeType
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.shared_cluster import SharedCluster
from mlmclm.sweeps.sweep_options import SweepOptions
from sweep_cells import FakeWorker, InACrew, NeverStarts, crew, make_cells, wait_until

CPU, HEAD_ONLY = {"CPU": 1.0}, Cluster(({},), {})
on_a_head_without_cpus = pytest.mark.parametrize("raylets", [0], indirect=True)
on_a_head_with_two_cpus = pytest.mark.parametrize("raylets", [2], indirect=True)


def test_a_wait_for_nodes_ends_with_the_reason() -> None:
    with pytest.raises(EnvironmentFault, match=r"has joined the Ray cluster in 0 s \(--wait-for-nodes\)"):
        service_cluster.await_nodes(lambda: HEAD_ONLY, 0.0)


def test_an_autoscaler_that_can_add_a_node_needs_no_wait() -> None:
    grows = Cluster(({},), {}, Growth((NodeType("cpu", CPU, 2),)))
    service_cluster.await_nodes(lambda: grows, 0.0)
    assert SharedCluster(CPU, lambda: grows).has_nodes


def test_a_first_node_that_is_too_small_for_a_cell_does_not_end_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_cluster, "SECONDS_BETWEEN_LOOKS", 0.0)
    nodes = [HEAD_ONLY.nodes, ({}, CPU), ({}, CPU, CPU), ({}, CPU, CPU, {"CPU": 4.0})]
    seen = iter([Cluster(each, {}, joinable=True) for each in nodes])
    service_cluster.await_nodes(lambda: next(seen), 1000.0, lambda cluster: {"CPU": 4.0})
    assert next(seen, None) is None
    said = capsys.readouterr().err.replace("\n", " ")
    assert "no node has 4 CPU yet: it has 1 CPUs and 0 GPUs on 2 nodes, and no autoscaler" in said
    pairs = iter([Cluster(each, {}, joinable=True) for each in (({}, CPU), ({}, CPU, CPU))])
    service_cluster.await_nodes(lambda: next(pairs), 1000.0, lambda cluster: CPU, places=2)
    assert next(pairs, None) is None
    assert "there are not 2 x 1 CPU yet: it has 1 CPUs" in capsys.readouterr().err.replace("\n", " ")
    # One that doesn't come is refused with the reason by `check_place`, as is one that can't come.
    service_cluster.await_nodes(lambda: Cluster((CPU,), {}, joinable=True), 0.0, lambda cluster: {"CPU": 4.0})
    private = Cluster((CPU,), {})
    service_cluster.await_nodes(lambda: private, 1000.0, lambda cluster: {"CPU": 4.0})
    small = Cluster((CPU,), {}, Growth((NodeType("cpu", CPU, 2),)), joinable=True)
    service_cluster.await_nodes(lambda: small, 1000.0, lambda cluster: {"CPU": 4.0})


@pytest.mark.slow
@on_a_head_without_cpus
def test_a_sweep_waits_for_the_first_node_and_for_one_that_replaces_it(
    raylets: Raylets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_cluster, "SECONDS_BETWEEN_LOOKS", 0.2)
    said: list[str] = []
    monkeypatch.setattr(service_cluster, "say", said.append)
    nodes = []

    def waits(times: int) -> bool:
        return sum(line.startswith("waiting for nodes") for line in said) == times

    def come_and_go() -> None:
        wait_until(lambda: waits(1))
        nodes.append(raylets.add_node(num_cpus=1))
        wait_until((tmp_path / "waiting").exists)
        raylets.remove_node(nodes.pop(), allow_graceful=False)
        wait_until(lambda: waits(2))
        nodes.append(raylets.add_node(num_cpus=1))

    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "1").write_text("waits")
    thread = threading.Thread(target=come_and_go, daemon=True)
    thread.start()
    cells = make_cells(3)
    outcome = run_sweep(cells, SweepOptions(store=tmp_path, worker=FakeWorker))
    thread.join()
    assert [result["key"] for result in outcome.results] == list(map(cell_key, cells)) and outcome.failed == []
    assert waits(2)
    with pytest.raises(
        UserError, match="A cell needs 3 CPU on one node, and no node of this Ray cluster can ever offer"
    ):
        run_sweep(make_cells(4), SweepOptions(store=tmp_path, worker=FakeWorker, cpus_per_cell=3))
    raylets.remove_node(nodes.pop())


@pytest.mark.slow
@on_a_head_without_cpus
def test_a_sweep_that_has_lost_its_only_node_ends_with_the_reason_after_the_wait(
    raylets: Raylets, tmp_path: Path
) -> None:
    small, large = raylets.add_node(num_cpus=1), raylets.add_node(num_cpus=2)
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0").write_text("waits")

    def go() -> None:
        wait_until((tmp_path / "waiting").exists)
        raylets.remove_node(large, allow_graceful=False)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    options = SweepOptions(store=tmp_path, worker=FakeWorker, cpus_per_cell=2, wait_for_nodes=1.0)
    with pytest.raises(EnvironmentFault, match=r"Waited 1 s.*no node has 2 CPU for a cell: it has 1 CPUs.*are kept"):
        run_sweep(make_cells(2), options)
    thread.join()
    raylets.remove_node(small)


@pytest.mark.slow
@on_a_head_with_two_cpus
def test_a_node_that_joins_late_is_used_and_one_that_leaves_is_done_without(raylets: Raylets, tmp_path: Path) -> None:
    (tmp_path / "wanted").write_text("3")

    def join_and_leave() -> None:
        wait_until(lambda: len(crew(tmp_path)) == 2)
        node = raylets.add_node(num_cpus=1)
        wait_until(lambda: len(crew(tmp_path)) == 3)
        (tmp_path / "wanted").write_text("4")  # now all three wait with a cell each
        wait_until(lambda: len(list((tmp_path / "cells").glob("*/*.json"))) >= 3)
        raylets.remove_node(node, allow_graceful=False)
        (tmp_path / "wanted").write_text("3")

    thread = threading.Thread(target=join_and_leave, daemon=True)
    thread.start()
    cells = make_cells(12)
    outcome = run_sweep(cells, SweepOptions(store=tmp_path, worker=InACrew))
    thread.join()
    assert [result["key"] for result in outcome.results] == list(map(cell_key, cells))
    assert outcome.failed == []


@pytest.mark.slow
@on_a_head_with_two_cpus
def test_workers_that_cannot_start_end_the_sweep_with_the_reason(raylets: Raylets, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"workers of the sweep do not start: .*no such library"):
        run_sweep(make_cells(3), SweepOptions(store=tmp_path, worker=NeverStarts))


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
import ray, sweep_cells
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.sweeps import shared_cluster
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.sweep_options import SweepOptions
ray.cloudpickle.register_pickle_by_value(sweep_cells)
shared_cluster.SECONDS_BETWEEN_LOOKS, shared_cluster.SECONDS_OF_WAITING = 0.5, 2.0
store = Path(sys.argv[1])
with ray_session(store, address=sys.argv[2]):
    run_sweep(sweep_cells.make_cells(int(sys.argv[3])), SweepOptions(store=store, worker=sweep_cells.UntilTold))
"""


@pytest.mark.slow
@on_a_head_without_cpus
def test_a_second_sweep_gets_its_share_while_the_first_goes_on(raylets: Raylets, tmp_path: Path) -> None:
    node = raylets.add_node(num_cpus=2)
    address = ray.get_runtime_context().gcs_address
    # As the jobs of a private cluster have it, which listens on loopback only and wants its token.
    environment = {**os.environ, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", "RAY_AUTH_MODE": "token"}
    logs = [(tmp_path / f"{name}.log").open("w") for name in "ab"]

    def driver(name: str) -> subprocess.Popen[bytes]:
        store = tmp_path / name
        store.mkdir()
        words = [sys.executable, "-c", DRIVER, str(store), address, "200", str(Path(__file__).parents[1])]
        return subprocess.Popen(words, stdout=logs["ab".index(name)], stderr=subprocess.STDOUT, env=environment)

    def cells(name: str) -> int:
        return len(list((tmp_path / name / "cells").glob("*/*.json")))

    def workers(name: str) -> int:
        return len(list((tmp_path / name / "workers").glob("*")))

    def gone() -> bool:
        return any(process.poll() is not None for process in drivers)

    drivers = [driver("a")]
    try:
        wait_until(lambda: gone() or workers("a") == 2)
        drivers.append(driver("b"))
        wait_until(lambda: gone() or cells("b") >= 3)
        before = cells("a")
        wait_until(lambda: gone() or cells("a") >= before + 3)
        assert not gone(), [(tmp_path / f"{name}.log").read_text() for name in "ab"]
        assert cells("b") >= 3 and cells("a") >= before + 3, "both get on"
        for name in "ab":
            (tmp_path / name / "told").touch()
        codes = [each.wait(300) for each in drivers]
    finally:
        for process in drivers:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    said = [(tmp_path / f"{name}.log").read_text() for name in "ab"]
    assert codes == [0, 0], said
    assert (cells("a"), cells("b")) == (200, 200)
    raylets.remove_node(node)
