"""Work under faults, compared with the same work without any:  python -m benchmarks.faults [--faults 60 | --study 300 | --nodes | --ends | --all]

`storage_faults` writes the table of an object store's faults, `--study` that of a whole study whose store is on a bucket
that fails (`study_on_a_bucket`), `--nodes` that of nodes that are lost, replaced, late or cut off, `--ends` that of the
ways in which a command is ended (both `node_faults`), and `--all` every one of them. With `--faults`, a whole sweep is disturbed:

A small real grid (two models, four tasks, three rates, ten seeds: 240 cells; models and data are the tests' own) runs on
a Ray cluster of three raylets, one CPU each for two of them, as `mlmclm sweep` in a process of its own, and tracks into an
MLflow server. Meanwhile workers are killed and stopped, a raylet is killed, a node joins late, the driver is killed and
started again, MLflow is killed and started again, and the disk is full for a while (if the system lets us mount one).

In the end every cell must have exactly one result, equal to the undisturbed sweep's, and MLflow exactly one run for each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import node_faults, storage_faults, study_on_a_bucket
from benchmarks.results import machine, write_section
from mlmclm.service.mlflow_server import SERVER_ENVIRONMENT
from mlmclm.tracking.saved_views import OF_CELLS

TASKS = ("sst2", "conll2003", "squad_4k", "reqa_squad")
RATES, SEEDS = (5e-4, 1e-3, 2e-3), tuple(range(10))
DISK_MB = 400
FAULTS, OUTAGE = 60, 300.0
"""Faults of a sweep, and seconds of each outage of a study, with `--all`."""
SECONDS_UNTIL_HUNG = 20.0
"""In place of two minutes, so that the benchmark takes less time."""
DRIVER = f"""
import sys
from mlmclm.sweeps import sweep_trials
sweep_trials.SECONDS_UNTIL_HUNG = {SECONDS_UNTIL_HUNG}
from mlmclm.cli.main import main
main()
"""
WEIGHTS = {"worker killed": 10, "worker stopped": 2, "node killed, another joins late": 2, "driver killed": 2,
           "MLflow killed": 2, "disk full": 1}  # fmt: skip
"""How often each fault occurs, relative to the others."""


def make_place(place: Path, *, hidden: int = 32, **space: Any) -> Path:
    """Write models, data, a space and a sweep file; return the last.

    Args:
        hidden: width of the models.
        space: changes of the space.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from small_models import save_small_model, write_all

    write_all(place / "data")
    models = {
        name: str(save_small_model(place / name, seed=seed, hidden=hidden)) for seed, name in enumerate(("one", "two"))
    }
    values = {
        "tasks": list(TASKS),
        "learning_rates": list(RATES),
        "seeds": list(SEEDS),
        "protocol": {"max_steps": 60, "max_length": 64, "stride": 16, "batch_size": 16},
        "retries": {"crash": 100, "hung": 100, "lost_node": 100},
        "gpus_per_cell": 0,
        **space,
    }
    (place / "space.yaml").write_text(yaml.safe_dump(values))
    file = place / "faults.yaml"
    file.write_text(yaml.safe_dump({"name": "faults", "models": models, "space": "space.yaml"}))
    return file


def results_in(store: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a store by key, without their costs."""
    results = [json.loads(path.read_text()) for path in (store / "cells").glob("*/*.json")]
    without = ("cost", "checksum")
    return {result["key"]: {name: value for name, value in result.items() if name not in without} for result in results}


def sweep_command(file: Path, store: Path) -> list[str]:
    """Return the command of a driver."""
    return [
        sys.executable, "-c", DRIVER, "sweep", str(file), "--store", str(store), "--data", str(file.parent / "data"),
    ]  # fmt: skip


class Disturbed:
    """The disturbed sweep, its cluster and its MLflow server.

    Args:
        file: the sweep file.
        store: the store, on a disk of its own if `disk` is given.
        raylets: the cluster.
        tracking: folder of MLflow's database.
    """

    def __init__(self, file: Path, store: Path, raylets: Any, address: str, tracking: Path, *, own_disk: bool) -> None:
        self.file, self.store, self.raylets, self.address = file, store, raylets, address
        self.tracking, self.own_disk = tracking, own_disk
        self.faults: Counter[str] = Counter()
        self.drivers = 0
        self.nodes = [raylets.add_node(num_cpus=1) for _ in range(2)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = self.start_server()
        self.driver = self.start_driver()

    def start_server(self) -> subprocess.Popen[bytes]:
        """Start the MLflow server and wait until it answers."""
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.tracking}/mlflow.db", "--artifacts-destination", str(self.tracking),
        ]  # fmt: skip
        log = (self.tracking / "server.log").open("ab")
        environment = os.environ | SERVER_ENVIRONMENT
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return server
            time.sleep(0.2)
        raise RuntimeError("the MLflow server doesn't answer")

    def start_driver(self) -> subprocess.Popen[bytes]:
        """Start, or start again, the sweep's driver."""
        self.drivers += 1
        environment = {**os.environ, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.port}"}
        log = (self.tracking / "driver.log").open("ab")
        command = [*sweep_command(self.file, self.store), "--ray", self.address]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.file.parent)

    def workers(self) -> list[psutil.Process]:
        """Return the processes that are computing a cell."""
        raylets = [process for node in self.raylets.list_all_nodes() for process in processes_of(node)]
        computing = []
        for raylet in raylets:
            for process in raylet.children(recursive=True):
                try:
                    title = " ".join(process.cmdline())
                    if title.startswith("ray::") and "/lr" in title and process.status() != psutil.STATUS_STOPPED:
                        computing.append(process)
                except psutil.Error:
                    continue
        return computing

    def signal_worker(self, number: int) -> bool:
        """Send a signal to a random worker that computes; return whether there was one."""
        workers = self.workers()
        if workers:
            random.choice(workers).send_signal(number)
        return bool(workers)

    def replace_node(self) -> bool:
        """Kill a raylet, and let another node join some seconds later."""
        self.raylets.remove_node(self.nodes.pop(0), allow_graceful=False)
        time.sleep(4)
        self.nodes.append(self.raylets.add_node(num_cpus=1))
        return True

    def kill_driver(self) -> bool:
        """Kill the driver; the main loop starts another."""
        self.driver.kill()
        self.driver.wait()
        return True

    def kill_server(self) -> None:
        """Kill MLflow's server and all its processes."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()

    def restart_server(self) -> bool:
        """Kill MLflow's server, and start it again some seconds later."""
        self.kill_server()
        time.sleep(3)
        self.server = self.start_server()
        return True

    def fill_disk(self) -> bool:
        """Fill the store's disk until the driver ends, for at most half a minute; then free it again."""
        if not self.own_disk:
            return False
        filler = self.store.parent / "filler"
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            except OSError:
                pass
        deadline = time.monotonic() + 30
        while self.driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        filler.unlink()
        return True

    def run(self, wanted: int, cells: int) -> None:
        """Cause faults one after another, until there are `wanted` and all cells have a result."""
        causes: dict[str, Callable[[], bool]] = {
            "worker killed": lambda: self.signal_worker(signal.SIGKILL),
            "worker stopped": lambda: self.signal_worker(signal.SIGSTOP),
            "node killed, another joins late": self.replace_node,
            "driver killed": self.kill_driver,
            "MLflow killed": self.restart_server,
            "disk full": self.fill_disk,
        }
        order = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
        random.shuffle(order)
        turn, last_count, last_time = 0, 0, time.monotonic()
        while True:
            code = self.driver.poll()
            if code == 0:
                return
            if code is not None:
                self.driver, last_time = self.start_driver(), time.monotonic()
            count = len(list((self.store / "cells").glob("*/*.json")))
            # About one fault for each cell: each must hit a running sweep, and leave it time to make progress.
            room = (cells - count) / max(1, wanted - self.faults.total())
            due = count - last_count >= min(2.0, 0.8 * room) or time.monotonic() > last_time + 45
            if self.faults.total() < wanted and count < cells and due and self.workers():
                name = order[turn % len(order)]
                turn += 1
                if causes[name]():
                    self.faults[name] += 1
                    last_count, last_time = count, time.monotonic()
                    print(f"{self.faults.total()}: {name} ({count} of {cells} cells)", file=sys.stderr, flush=True)
            time.sleep(0.1)

    def close(self) -> None:
        """End the driver and the server."""
        if self.driver.poll() is None:
            self.kill_driver()
        self.kill_server()


def processes_of(node: Any) -> list[psutil.Process]:
    """Return a node's raylet process."""
    infos = node.all_processes.get("raylet", [])
    return [psutil.Process(info.process.pid) for info in infos if psutil.pid_exists(info.process.pid)]


@contextmanager
def own_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk for the block; yield False if the system does not allow it."""
    folder.mkdir()
    code = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode
    try:
        yield code == 0
    finally:
        if code == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def runs_of(address: str) -> Counter[str]:
    """Return how many runs MLflow has of each cell."""
    from mlflow import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("faults")
    runs, token = Counter[str](), None
    while experiment is not None:
        page = client.search_runs([experiment.experiment_id], OF_CELLS, max_results=1000, page_token=token)
        runs.update(run.data.tags["mlmclm.cell"] for run in page)
        token = page.token
        if not token:
            break
    return runs


def main() -> None:
    """Write the table of an object store's faults, or the sections that the options name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, metavar="NUMBER", help="so many faults of a whole sweep on a cluster")
    parser.add_argument(
        "--study", type=float, metavar="SECONDS", help="a study on a bucket, with two outages that last so long"
    )
    parser.add_argument("--nodes", action="store_true", help="nodes that are lost, replaced, late or cut off")
    parser.add_argument("--ends", action="store_true", help="commands that are ended, and variables that mislead them")
    parser.add_argument(
        "--all", action="store_true", help=f"all tables, with {FAULTS} faults and outages of {OUTAGE:.0f} s: some hours"
    )
    options = parser.parse_args()
    faults, outage = options.faults or (FAULTS if options.all else 0), options.study or (OUTAGE if options.all else 0.0)
    if options.all or not (faults or outage or options.nodes or options.ends):
        storage_faults.measure()
    if faults:
        disturb_sweep(faults)
    if outage:
        study_on_a_bucket.write(outage)
    if options.all or options.nodes:
        node_faults.measure()
    if options.all or options.ends:
        node_faults.measure_ends()


def disturb_sweep(wanted: int) -> None:
    """Run a sweep twice, once with so many faults, compare the results, and write the section."""
    random.seed(0)
    with tempfile.TemporaryDirectory() as temporary, own_disk(Path(temporary) / "disk") as mounted:
        place = Path(temporary)
        file, store = make_place(place), place / "disk" / "store"
        plain = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
        began = time.perf_counter()
        subprocess.run(sweep_command(file, place / "calm"), env=plain, cwd=place, check=True, stdout=subprocess.DEVNULL)
        calm_seconds, calm = time.perf_counter() - began, results_in(place / "calm")

        import ray
        from ray.cluster_utils import Cluster

        from mlmclm.cluster.ray_cluster import ray_session

        (place / "tracking").mkdir()
        with ray_session(place / "session", num_cpus=0) as session:
            raylets = Cluster(initialize_head=False, shutdown_at_exit=False)
            raylets.head_node = ray._private.worker._global_node
            began = time.perf_counter()
            disturbed = Disturbed(file, store, raylets, session.address, place / "tracking", own_disk=mounted)
            try:
                disturbed.run(wanted, len(calm))
                seconds, results = time.perf_counter() - began, results_in(store)
                runs = runs_of(f"http://127.0.0.1:{disturbed.port}")
            finally:
                disturbed.close()
                for node in list(disturbed.nodes):
                    raylets.remove_node(node, allow_graceful=False)
        retried = Counter(
            failure["failure"]
            for path in (store / "cells").glob("*/*.json")
            for failure in json.loads(path.read_text())["cost"].get("retried_after", ())
        )
        assert results == calm, "the results differ"
        assert runs == Counter(dict.fromkeys(calm, 1)), "MLflow lacks runs or has too many"
    lines = [
        f"Command: `python -m benchmarks.faults --faults {wanted}`. Machine: {machine()}; three raylets, two workers.",
        f"{len(calm)} cells; {disturbed.faults.total()} faults. Every cell has exactly one result, equal to the undisturbed",
        "sweep's in all but its cost, and MLflow has exactly one run of each.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(disturbed.faults.items())),
        "",
        f"Drivers started: {disturbed.drivers}. Retries within a driver, by class: "
        + (", ".join(f"{name} {count}" for name, count in sorted(retried.items())) or "none")
        + f". Seconds: {calm_seconds:.0f} undisturbed (two workers, private cluster), {seconds:.0f} disturbed.",
    ]
    write_section("Faults", lines)


if __name__ == "__main__":
    main()
