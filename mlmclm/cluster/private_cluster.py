"""Start of a private Ray cluster on this machine: in a folder of its own, on loopback, with patience.

A loaded machine can be too slow for one of Ray's time limits. A start that failed or hung leaves no process behind, and
is tried again in another folder with longer limits.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mlmclm.cluster.cluster_guard import end_processes, guarded
from mlmclm.environment import environment
from mlmclm.errors import EnvironmentFault
from mlmclm.progress import say
from mlmclm.storage.temporary import sweep_folders, swept_folder

TEMPORARY_PREFIX = "mlmclm-ray-"
ROOT = "r"
"""Name of Ray's root folder inside our own private folder: Ray makes its root writable for everyone."""
LONGEST_ROOT = 40
"""Ray's socket paths add up to 65 characters to its root folder, and the system allows 107."""
SECONDS_TO_REGISTER = 120.0
"""Seconds for the node to register in the first attempt. Ray's limit of 30 cannot be set; see `_patient`."""
DASHBOARD_LIMIT = "RAY_DASHBOARD_STARTUP_TIMEOUT_S"
START_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": "120",  # for its head service to listen; 30
    "RAY_gcs_rpc_server_connect_timeout_s": "60",  # for the head service to answer; 5
    "RAY_py_gcs_connect_timeout_s": "120",  # 30
    "RAY_gcs_server_request_timeout_seconds": "180",  # 60
    "RAY_raylet_start_wait_time_s": "5",  # for one look for the node; 30, in which its death would not be noticed
    "RAY_raylet_client_num_connect_attempts": "60",  # for the driver to reach the node, one second each; 10
    "RAY_agent_register_timeout_ms": "180000",  # without its two agents, Python processes, a node ends itself; 30,000
    "RAY_worker_register_timeout_seconds": "180",  # 60
    DASHBOARD_LIMIT: "180",  # 60
}
"""Time limits of the first attempt to start Ray, with Ray's defaults in the comments: a loaded machine needs longer.

The variables come from `_private/node.py`, `_private/ray_constants.py` and `src/ray/common/ray_config_def.h`.
"""
STARTS = 3
"""Number of attempts to start a private cluster. Each has twice the time limits of the one before."""
SECONDS_A_START = 300.0
"""Seconds after which the first attempt counts as hung, and its processes are ended so that it fails."""
SECONDS_BETWEEN_LOOKS = 0.2
MESSAGE_LINES, LOG_LINES = 3, 8
"""Lines of Ray's error message, and of its logs, that a failed start shows."""
FAILED_START = "failed_start"
"""Folder of Ray's logs of the last start that failed, in `store/ray`."""
_REASON = re.compile(r" [EFC] \d+ |\b(ERROR|CRITICAL|FATAL)\b|^(\w+\.)*\w*(Error|Exception|Exit)\b", re.MULTILINE)
"""Lines that give a reason: of Ray's C++ logs, of Python's, or the last one of a traceback."""


@contextmanager
def private_cluster(store: Path, init: Callable[..., None]) -> Iterator[Path]:
    """Start a cluster in a new folder that only its owner can enter, and end it after the block; yield the folder.

    Args:
        store: keeps Ray's logs in `ray/failed_start` if the cluster doesn't start.
        init: starts it and connects this process, given `_temp_dir`; raises an EnvironmentFault if that fails.

    Raises:
        EnvironmentFault: it doesn't start in `STARTS` attempts; the message has Ray's reasons.
    """
    for number in range(1, STARTS + 1):
        with ExitStack() as own:
            private = own.enter_context(swept_folder(short_root(), TEMPORARY_PREFIX))
            own.enter_context(guarded(private))
            times = 2 ** (number - 1)
            # `ray.init` has no overall timeout; ending its processes is what makes a hung call fail.
            hung = threading.Timer(SECONDS_A_START * times, end_processes, [private])
            hung.daemon = True
            hung.start()
            try:
                with patience(times), _own_temporary_folder(private):
                    init(_temp_dir=str(private / ROOT))
            except EnvironmentFault as fault:
                end_processes(private)  # their last lines are in the logs then
                reasons = "".join(f"\n  {line}" for line in reasons_in(_logs(private)))
                if number < STARTS:
                    say(f"{fault}{reasons}\nTrying again with twice the time limits ({number + 1} of {STARTS}).")
                    continue
                kept = _keep_logs(private, store)
                where = "" if kept is None else f"\nRay's logs are in {kept}."
                raise EnvironmentFault(f"{fault}{reasons}{where}") from fault
            finally:
                hung.cancel()
            yield private
            return


@contextmanager
def patience(times: int) -> Iterator[None]:
    """Multiply Ray's limits for a start by a number for the block; what the user has set is kept.

    This process's own C++ library reads its limits only once, so that later attempts have longer ones in Ray's daemons
    and in its Python code.
    """
    from ray._private import ray_constants, services

    longer = {
        name: str(int(limit) * times) for name, limit in START_LIMITS.items() if os.environ.get(name, limit) == limit
    }
    with (
        environment(longer),
        # This module has read it already.
        replaced(ray_constants, "RAY_DASHBOARD_STARTUP_TIMEOUT_S", int(os.environ[DASHBOARD_LIMIT])),
        replaced(services, "get_node", partial(_patient, services.get_node, SECONDS_TO_REGISTER * times)),
    ):
        yield


def _patient(get_node: Callable[..., Any], seconds: float, *arguments: Any) -> Any:
    """Return a node's description once it has registered: Ray's own loop around `get_node` gives it 30 s.

    Raises:
        RuntimeError: it hasn't in that time.
        Exception: its process has ended.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return get_node(*arguments)
        except RuntimeError:
            if not has_raylet():
                raise Exception("Ray's node (raylet) has ended during its start.") from None
            if time.monotonic() > deadline:
                raise
            time.sleep(SECONDS_BETWEEN_LOOKS)


def has_raylet() -> bool:
    """Return whether a node that this process has started is alive."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "raylet" in Path((child.cmdline() or [""])[0]).name and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


@contextmanager
def _own_temporary_folder(private: Path) -> Iterator[None]:
    """Give the dashboard a temporary folder that is removed with the cluster's: its fork server leaves one behind."""
    from ray._private import services

    folder, start = private / "t", services.start_api_server
    folder.mkdir()

    def started(*arguments: Any, **named: Any) -> Any:
        with environment({"TMPDIR": str(folder)}):
            return start(*arguments, **named)

    with replaced(services, "start_api_server", started):
        yield


def reason_of(error: BaseException) -> str:
    """Return the last lines of Ray's message in one, because the reason comes last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join((f"{type(error).__name__}:", *lines[-MESSAGE_LINES:]))


def reasons_in(logs: Mapping[str, str]) -> list[str]:
    """Return the last lines of Ray's logs that give a reason, at most `LOG_LINES`, each with the name of its file."""
    found = []
    for name, text in logs.items():
        lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if _REASON.search(line.strip())))
        found += [f"{name}: {line}" for line in lines[-MESSAGE_LINES:]]
    return found[:LOG_LINES]


def _logs(private: Path) -> dict[str, str]:
    """Return the logs of Ray's daemons and agents by file name, those in whose failure others fail first."""
    found: dict[str, str] = {}
    for stem in ("gcs_server", "raylet", "dashboard_agent", "runtime_env_agent", "dashboard"):
        for path in sorted(private.glob(f"{ROOT}/session_2*/logs/{stem}.*")):
            with suppress(OSError):
                found[path.name] = path.read_text(encoding="utf-8", errors="replace")
    return found


def _keep_logs(private: Path, store: Path) -> Path | None:
    """Copy Ray's logs into the store in place of those of an earlier failed start; return their folder, if any."""
    kept = store.resolve() / "ray" / FAILED_START
    with suppress(OSError, shutil.Error):  # such as a full disk, which may well be the reason
        for logs in private.glob(f"{ROOT}/session_2*/logs"):
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(logs, kept)
            return kept
    return None


@contextmanager
def own_settings(*, for_jobs: bool) -> Iterator[None]:
    """Make a new cluster's servers listen on 127.0.0.1 only, and the agent of its node on a free port.

    Ray does the former by itself on systems on which it doesn't support multi-node clusters. Otherwise some ten ports
    are open to the network, including the one for serialised code, protected only by the token.

    `ray.init` has no argument for the agent's port, and by default only the first cluster on a machine gets it: the
    agents of the others have none, and their dashboards then take no jobs. Nor has it one to leave out the processes of
    the autoscaler and of the log monitor, which have nothing to do if the cluster is not `for_jobs`.
    """
    from ray._private import parameter, ray_constants

    settings = {"dashboard_agent_listen_port": 0, "no_monitor": not for_jobs, "include_log_monitor": for_jobs}
    own = partial(parameter.RayParams, **settings)
    with (
        # For the daemons and workers; this process has already read it.
        environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}),
        replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        replaced(parameter, "RayParams", own),
    ):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module for the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def short_root() -> Path:
    """Return the system's temporary folder, or /tmp if that is too long for Ray's sockets or not ASCII."""
    chosen = Path(tempfile.gettempdir()).resolve()
    fits = str(chosen).isascii() and len(f"{chosen}/{TEMPORARY_PREFIX}12345678/{ROOT}") <= LONGEST_ROOT
    return chosen if fits else Path("/tmp")


def sweep_clusters() -> None:
    """Remove what the private clusters of killed processes have left in the temporary folder.

    A cluster's guard does that as well, unless it was killed too.
    """
    root = short_root()
    sweep_folders(root, TEMPORARY_PREFIX)
    for abandoned in root.glob(f"{TEMPORARY_PREFIX}*.json"):
        if not abandoned.with_suffix("").exists():
            with suppress(OSError):  # another user's file
                abandoned.unlink()
