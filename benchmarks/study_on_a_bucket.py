"""A whole study whose store is on an object store with faults, compared with the same study in a folder."""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.results import machine, write_section
from mlmclm.storage.files import hash_file
from mlmclm.storage.objects import ObjectPath
from mlmclm.sweeps.results_store import ResultsStore

SHARE = 0.05
"""Share of the requests that a fault hits."""
STORE = "s3://bucket/study"
RUNS, CELLS = "/study/runs/", "/study/cells/"
SECONDS_TO_LIVE = 3600.0


class BucketStudy:
    """A study that is run by one machine after another, on a store behind a proxy.

    Args:
        place: an empty folder.
        outage: seconds of each of the two outages.
    """

    def __init__(self, place: Path, proxy: Any, outage: float) -> None:
        from small_study import write_study

        self.place, self.proxy, self.outage = place, proxy, outage
        self.file = write_study(place)
        self.machines = 0
        self.done: list[str] = []

    def start(self, store: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start `mlmclm study` in its own process, with an empty folder that stands for a new machine."""
        self.machines += 1
        folder = self.place / f"machine{self.machines}"
        words = ("study", self.file, "--data", self.place / "data", "--store", store)
        command = [sys.executable, "-m", "mlmclm", *map(str, words)]
        log = (self.place / "driver.log").open("ab")
        variables = {"MLMCLM_STORE_FOLDER": str(folder), "OMP_NUM_THREADS": "1", **environment}
        return subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=log, stderr=log, cwd=self.place, start_new_session=True
        )

    def undisturbed(self) -> Path:
        """Run the study in a folder; return that store."""
        store = self.place / "calm"
        if self.start(str(store)).wait(SECONDS_TO_LIVE):
            raise RuntimeError((self.place / "driver.log").read_text(errors="replace")[-3000:])
        return store

    def disturbed(self) -> Path:
        """Run it on the bucket, with all faults; return the last machine's copy of the store."""
        driver = self._on_a_bucket()
        plans = (("pretraining", RUNS), ("the sweep", CELLS))
        deadline = time.monotonic() + SECONDS_TO_LIVE
        for phase, path in plans:
            self._until(driver, partial(self._written, path), deadline)
            self.proxy.outage(self.outage)
            self.done.append(f"outage of {self.outage:g} s in {phase}")
            time.sleep(self.outage + 1)
            # After the outage it must make progress. Then it is killed, and its machine's files are deleted.
            after = self._written(path)
            self._until(driver, partial(self._has_gone_on, path, after), deadline)
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
                shutil.rmtree(self.place / f"machine{self.machines}", ignore_errors=True)
                self.done.append(f"machine lost in {phase}")
                driver = self._on_a_bucket()
        if driver.wait(max(1.0, deadline - time.monotonic())):
            raise RuntimeError((self.place / "driver.log").read_text(errors="replace")[-3000:])
        return next((self.place / f"machine{self.machines}").iterdir())

    def _on_a_bucket(self) -> subprocess.Popen[bytes]:
        return self.start(STORE, FSSPEC_S3_ENDPOINT_URL=self.proxy.endpoint)

    def _written(self, path: str) -> int:
        """Return how many checkpoints (by their manifests) or results were sent."""
        return sum(method == "PUT" and path in where and ".json" in where for method, where in list(self.proxy.seen))

    def _has_gone_on(self, path: str, since: int) -> bool:
        return self._written(path) > since

    def _until(self, driver: subprocess.Popen[bytes], come: Callable[[], object], deadline: float) -> None:
        while not come() and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)


def content_of(store: Path, bucket: Any = None) -> dict[str, Any]:
    """Return the content of a study's store: results without their costs, hashes of weights, and tables.

    Args:
        bucket: where the results are, if not in the store.
    """
    results_store = ResultsStore(store, root=bucket)
    results = {key: {**result, "cost": None} for key, result in results_store.find_all(results_store.keys()).items()}
    weights = {path.relative_to(store).as_posix(): hash_file(path) for path in store.glob("states/*/**/*.safetensors")}
    tables = {path.name: _rows(path) for path in (store / "studies" / "small").glob("*.csv")}
    return {"results": results, "weights": weights, "tables": tables}


def _rows(path: Path) -> list[dict[str, str]]:
    """Return a table's rows without the columns that depend on the time and the machine."""
    with path.open(newline="") as file:
        return [
            {name: value for name, value in row.items() if "second" not in name and "hour" not in name}
            for row in csv.DictReader(file)
        ]


def measure(outage: float) -> list[str]:
    """Run the study both ways and compare; return the lines of the section: the faults and the number of requests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fault_proxy import FaultProxy
    from object_stores import s3_server, use_endpoint

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary, s3_server() as endpoint, FaultProxy(endpoint) as proxy:
        study = BucketStudy(Path(temporary), proxy, outage)
        began = time.perf_counter()
        wanted = content_of(study.undisturbed())
        calm = time.perf_counter() - began
        proxy.disturb(SHARE)
        began = time.perf_counter()
        try:
            store = study.disturbed()
            seconds = time.perf_counter() - began
            requests, hit = len(proxy.seen), Counter(proxy.caused)
            use_endpoint(endpoint)
            got = content_of(store, ObjectPath(STORE))
        except BaseException:
            print((study.place / "driver.log").read_text(errors="replace")[-6000:], file=sys.stderr)
            raise
    assert len(wanted["results"]) == 24 and wanted["weights"] and wanted["tables"], "the undisturbed study is not whole"
    for name, value in wanted.items():
        assert got[name].keys() == value.keys(), f"{name}: {json.dumps(sorted(got[name].keys() ^ value.keys()))}"
        differing = [key for key in value if got[name][key] != value[key]]
        assert not differing, f"{name} differ: {differing}"
    return [
        f"{len(wanted['results'])} cells, {len(wanted['weights'])} files of weights and {len(wanted['tables'])} tables are equal to those of the "
        "undisturbed study in a folder.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {what} | 1 |" for what in study.done),
        *(f"| {kind} | {count} |" for kind, count in sorted(hit.items())),
        "",
        f"Requests: {requests}. Seconds: {calm:.0f} undisturbed in a folder, {seconds:.0f} disturbed.",
    ]


def write(outage: float) -> None:
    """Measure, and write the section."""
    lines = [
        f"Command: `python -m benchmarks.faults --study {outage:g}`. Machine: {machine()}; an S3 server (moto) behind a proxy.",
        f"A study of three models and two tasks has its store at an address. A fault hits {SHARE:.0%} of all requests; after each outage the "
        "driver is killed and its machine's folder deleted, and another machine goes on.",
        *measure(outage),
    ]
    write_section("A study on a bucket", lines)
