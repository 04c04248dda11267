"""The record of a store's service: its addresses and its processes, which are identified by id and start time.

The record is `store/service/state.json`. A running process is the recorded one if the machine has not been rebooted since, and
the process has the recorded id and start time.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mlmclm.errors import UserError
from mlmclm.storage.files import machine, read_json, write_json

MLFLOW = "MLflow"
"""Name of MLflow's servers among the members, and of links to them."""


@dataclass(frozen=True)
class Member:
    """A process of a service; `started` is in clock ticks since the machine was booted."""

    name: str
    pid: int
    started: int


@dataclass(frozen=True)
class ServiceState:
    """A service as it was started.

    `since` is in seconds since 1970, `addresses` are by server, and `leftovers` are the temporary files and folders
    that its processes leave behind when they are killed. Its first member starts and ends the others.
    """

    machine: str
    host: str
    since: float
    ready: bool
    addresses: dict[str, str]
    members: tuple[Member, ...]
    leftovers: tuple[str, ...] = ()

    def alive(self) -> list[Member]:
        """Return the members that still run.

        Raises:
            UserError: the service is another machine's, whose processes can't be seen from here.
        """
        if self.machine == machine():
            return [member for member in self.members if start_of(member.pid) == member.started]
        if self.host == platform.node():  # the machine has been rebooted since
            return []
        raise UserError(
            f"The service of this store was started on {self.host}, and this is {platform.node()}: run the command there. "
            "If that machine is gone, delete service/state.json in the store."
        )


def service_folder(store: Path) -> Path:
    """Return the folder of a service's record and logs."""
    return store.resolve() / "service"


def read_state(store: Path) -> ServiceState | None:
    """Return the record of a store's service; None if none has been started, or if it was ended.

    Raises:
        UserError: the record is damaged.
    """
    path = service_folder(store) / "state.json"
    if not path.exists():
        return None
    values = read_json(path)
    try:
        members = tuple(Member(**member) for member in values["members"])
        return ServiceState(**values | {"members": members, "leftovers": tuple(values["leftovers"])})
    except (TypeError, KeyError) as error:
        raise UserError(
            f"{path}: not the record of a service ({error}). Delete it, and end the processes that it names by hand."
        ) from error


def own_server(store: Path) -> str | None:
    """Return the address of the MLflow server that a service on this machine runs on the store's own database, if any."""
    state = read_state(store)
    if state is None or state.machine != machine() or all(member.name != MLFLOW for member in state.members):
        return None
    return state.addresses.get("mlflow")


def own_addresses(store: Path) -> dict[str, str]:
    """Return the address of each server of the store's service; empty if none runs on this machine."""
    state = read_state(store)
    return state.addresses if state is not None and state.machine == machine() and state.alive() else {}


def write_service_state(store: Path, state: ServiceState) -> None:
    """Write the record, completely or not at all."""
    write_json(service_folder(store) / "state.json", asdict(state))


def start_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine was booted; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The fields after the name, which is in brackets and may contain any character: see proc(5).
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def members_of(name: str, processes: Iterable[psutil.Process]) -> list[Member]:
    """Return the members for these processes, without those that have ended."""
    starts = ((process.pid, start_of(process.pid)) for process in processes)
    return [Member(name, pid, started) for pid, started in starts if started is not None]


def with_children(members: Iterable[Member]) -> list[psutil.Process]:
    """Return the processes of living members, with all their descendants."""
    processes: dict[psutil.Process, None] = {}
    for member in members:
        with suppress(psutil.Error):
            process = psutil.Process(member.pid)
            if start_of(member.pid) == member.started:
                processes.update(dict.fromkeys((process, *process.children(recursive=True))))
    return list(processes)
