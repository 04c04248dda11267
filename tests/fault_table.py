"""Outcome of each fault of an object store at each stage of a sweep.

A stage is first run without a fault. Then the fault hits each of its requests in turn, and what the stage returned and left
behind is compared with the undisturbed run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fault_proxy import FaultProxy
from mlmclm.errors import MissingBucket, MlmclmError, StorageFault
from mlmclm.finetuning.cell import cell_key
from mlmclm.results.examples import to_parquet
from mlmclm.storage.leases import ObjectLeases
from mlmclm.storage.objects import ObjectPath, bucket_of
from mlmclm.storage.retrying import RetryPolicy
from mlmclm.sweeps.manifest import read_manifest, write_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import Planned
from mlmclm.sweeps.status import Watch
from object_stores import store_at, use_endpoint
from sweep_cells import make_cells, make_result

LEASE = 4.0
"""Seconds for which a lease is valid; leases are renewed every half second."""
CELLS = make_cells(4)
FILED, NEW = CELLS[:3], CELLS[3]
NAME = "disturbed"
GIVEN_UP_AFTER = 1.0
"""Seconds after which a client gives up a request; a fault of the kind `hang` takes longer."""


def content_of(result: dict[str, Any]) -> bytes:
    """Return the Parquet file of a result's examples."""
    return to_parquet(result, {"correct": np.array([0, 1])}, ())


def fill(store: Path) -> None:
    """Create a store with a manifest of four cells, three of which have a result in the bucket."""
    write_manifest(store / "studies" / NAME, NAME, Planned(CELLS))
    results_store = ResultsStore(store)
    for cell in FILED:
        results_store.write_examples(make_result(cell), content_of(make_result(cell)))
        results_store.write(make_result(cell))


def hasty_results_store(store: Path) -> ResultsStore:
    """Return the results store of a store, with leases of `LEASE` seconds."""
    results_store = ResultsStore(store)
    assert isinstance(results_store.folder, ObjectPath)
    results_store.leases = ObjectLeases(results_store.folder.parent, seconds=LEASE)
    return results_store


def read_result(store: Path) -> Any:
    """Look up one result and its examples."""
    results_store, key = ResultsStore(store), cell_key(FILED[0])
    result = results_store.find(key)
    return result, result and results_store.examples(result).columns["correct"].tolist()


def read_results(store: Path) -> Any:
    """Look up all results at once."""
    return ResultsStore(store).results(CELLS)


def list_results(store: Path) -> Any:
    """List the keys of all results."""
    return sorted(ResultsStore(store).keys())


def read_status(store: Path) -> Any:
    """Return the status of each cell of the manifest."""
    progress = Watch(read_manifest(NAME, store), ResultsStore(store)).look()
    return [state.status for state in progress.states]


def lease(store: Path) -> Any:
    """Take a lease, and release it."""
    root = ResultsStore(store).folder.parent
    assert isinstance(root, ObjectPath)
    with ObjectLeases(root, seconds=LEASE).attempt(["cells-new"]) as other:
        held = sorted(ObjectLeases(root).held(""))
    return other, held


def renew(store: Path) -> Any:
    """Hold a lease until it has been renewed twice; return whether it was still held then."""
    root = ResultsStore(store).folder.parent
    assert isinstance(root, ObjectPath)
    path, contents, ends = root / "claims" / "cells-new", set(), time.monotonic() + 60
    with ObjectLeases(root, seconds=LEASE).attempt(["cells-new"]) as other:
        looking = ObjectLeases(root, seconds=LEASE)
        while len(contents) < 3 and time.monotonic() < ends:
            contents.add(path.read_bytes())
            kept = looking.holder("cells-new") is not None
            time.sleep(LEASE / 16)
    return other, kept, len({json.loads(content)["token"] for content in contents})


def file_result(store: Path) -> Any:
    """Lease a cell, file its result, and read it back, as a worker does."""
    results_store, result = hasty_results_store(store), make_result(NEW)
    computed = 0

    def compute(cell: Any) -> dict[str, Any]:
        nonlocal computed
        computed += 1
        results_store.write_examples(result, content_of(result))
        return result

    filed, _ = results_store.ensure(cell_key(NEW), lambda: compute(NEW))
    return filed, results_store.examples(filed).columns["correct"].tolist()


def set_aside(store: Path) -> Any:
    """Move a result out of the way."""
    folder = hasty_results_store(store).set_aside(cell_key(FILED[2]))
    return sorted(path.name for path in folder.iterdir())


STAGES: dict[str, Callable[[Path], Any]] = {
    "reading a result": read_result,
    "reading all results": read_results,
    "listing": list_results,
    "manifest and status": read_status,
    "lease": lease,
    "renewal": renew,
    "filing a result": file_result,
    "setting aside": set_aside,
}
CHANGING = ("filing a result", "setting aside")
"""Stages that change the store."""
KILLED = ("lease", "renewal", *CHANGING)
"""Stages at which a kill can leave something behind."""


@dataclass
class Scene:
    """A disturbed object store for one stage.

    Args:
        place: a folder of its own.
        url: a prefix of the bucket.
    """

    proxy: FaultProxy
    place: Path
    url: str
    number: int = 0
    used: bool = True

    @property
    def store(self) -> Path:
        """The present store."""
        return store_at(self.place, f"{self.url}/{self.number}")

    @contextmanager
    def prepared(self, stage: str) -> Iterator[Path]:
        """Yield a store with its results in the bucket; it is a new one if the stage changes it or the last one did."""
        self.proxy.clear()
        if stage in CHANGING or self.used:
            self.number += 1
            fill(self.store)
        self.used = stage in CHANGING
        self.proxy.clear()
        try:
            yield self.store
        finally:
            self.proxy.clear()

    def left(self, store: Path) -> Any:
        """Return what a stage has left behind: results, examples, leases, and unfiled results."""
        self.proxy.clear()
        results_store = ResultsStore(store)
        assert results_store.unfiled is not None
        results = results_store.find_all(map(cell_key, CELLS))
        examples = {key: results_store.examples(result).columns["correct"].tolist() for key, result in results.items()}
        return results, examples, sorted(results_store.holders()), results_store.unfiled.keys()

    def undisturbed(self, stage: str) -> tuple[Any, int]:
        """Run a stage without a fault; return what it returned and left behind, and its number of requests."""
        with self.prepared(stage) as store:
            value = STAGES[stage](store)
            requests = len(self.proxy.seen)
            return (value, self.left(store)), requests

    def outcome(self, kind: str, stage: str, request: int, wanted: Any, *, seconds: float = 0.0) -> str:
        """Return what happened when a fault hit a request (from 0) of a stage: empty if all was as `wanted`."""
        with self.prepared(stage) as store:
            if kind == "down":
                self.proxy.inject("delay", skip=request, act=lambda: self.proxy.outage(seconds))
            else:
                self.proxy.inject(kind, skip=request, seconds=seconds)
            try:
                value = STAGES[stage](store)
            except (MlmclmError, OSError, AssertionError) as error:
                return f"{type(error).__name__}: {error}"
            if kind == "hang":
                self.proxy.settle()  # the request that the client has given up is carried out, too
                time.sleep(LEASE / 2)
            results = value, self.left(store)
            self.used = self.used or results != wanted
            return "" if results == wanted else f"{results} is not {wanted}"

    def killed(self, stage: str, request: int, wanted: Any) -> str:
        """Kill a process that runs a stage when a request (from 0) of it arrives, and run the stage again.

        Returns:
            What is not as `wanted` after that.
        """
        with self.prepared(stage) as store:
            # Forked from a server that has imported everything, which would take most of the time. Python 3.11 doesn't give
            # that server this process's path.
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            server = multiprocessing.get_context("forkserver")
            server.set_forkserver_preload([__name__])
            process = server.Process(target=run_stage, args=(stage, self.proxy.endpoint, store), daemon=True)
            self.proxy.inject("delay", skip=request, act=process.kill)
            process.start()
            process.join(300)
            if process.exitcode != -signal.SIGKILL:
                return f"it was not killed at request {request}"
            return self.run_again(stage, store, wanted)

    def refused(self, kind: str, stage: str, wanted: Any) -> str:
        """Run a stage while the bucket is missing or in an outage longer than the retry timeout, and then again.

        Returns:
            What is not as `wanted` after that, or that there was no error.
        """
        availability = bucket_of(self.url).availability
        before = availability.retry
        with self.prepared(stage) as store:
            availability.retry = RetryPolicy(seconds=0.5, first=0.01, most=0.1, silent=0.0)
            self.proxy.inject(kind, times=1_000_000)
            try:
                STAGES[stage](store)
                return "no error"
            except (StorageFault, MissingBucket):
                pass
            finally:
                availability.retry = before
            return self.run_again(stage, store, wanted)

    def run_again(self, stage: str, store: Path, wanted: Any) -> str:
        """Run a stage as the next command would, once the leases of killed processes have ended; return what is not as `wanted`."""
        self.proxy.clear()
        results_store = ResultsStore(store)
        assert isinstance(results_store.folder, ObjectPath)
        results_store.file_unfiled()
        leases = ObjectLeases(results_store.folder.parent, seconds=LEASE / 4)
        keys = [cell_key(FILED[2]), cell_key(NEW)]
        with leases.wait(lambda: ["cells-new", *map(results_store.lease, keys)], lambda other: None):
            pass
        moved = stage == "setting aside" and results_store.find(keys[0]) is None
        results = wanted[0] if moved else STAGES[stage](store), self.left(store)
        self.used = True
        return "" if results == wanted else f"{results} is not {wanted}"


def run_stage(stage: str, endpoint: str, store: Path) -> None:
    """Run one stage in this process."""
    use_endpoint(endpoint, GIVEN_UP_AFTER)
    STAGES[stage](store)
