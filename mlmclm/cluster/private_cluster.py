"""Start of a private Ray cluster on this machine, in a new folder and on loopback.

A loaded machine can be too slow for one of Ray's time limits. If a start fails or hangs, its processes are ended, and
the start is tried again in another folder.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
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
"""Name of Ray's root folder inside the private folder: Ray makes its root writable for everyone."""
LONGEST_ROOT = 40
"""Ray's socket paths add up to 65 characters to its root folder, and the system allows 107."""
START_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": "120",  # for its head service to listen; 30
    "RAY_gcs_rpc_server_connect_timeout_s": "60",  # for the head service to answer; 5
    "RAY_py_gcs_connect_timeout_s": "120",  # 30
    "RAY_gcs_server_request_timeout_seconds": "180",  # 60
    "RAY_raylet_client_num_connect_attempts": "60",  # for the driver to reach the node, one second each; 10
    "RAY_raylet_start_wait_time_s": "60",  # for the node to register; 30
    "RAY_agent_register_timeout_ms": "180000",  # without its two agents, Python processes, a node ends itself; 30,000
    "RAY_worker_register_timeout_seconds": "180",  # 60
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180",  # 60
}
"""Ray's variables for time limits of a start, with Ray's defaults at the end of the comments: a loaded machine needs longer."""
STARTS = 2
"""Number of attempts to start a private cluster."""
SECONDS_A_START = 300.0
"""Seconds after which an attempt counts as hung, and its processes are ended so that it fails."""
MESSAGE_LINES, LOG_LINES = 3, 8
"""Lines of Ray's error message, and of its logs, that a failed start shows."""
FAILED_START = "failed_start"
"""Folder of Ray's logs of the last start that failed, in `store/ray`."""
_REASON = re.compile(r" [EFC] \d+ |\b(ERROR|CRITICAL|FATAL)\b|^(\w+\.)*\w*(Error|Exception|Exit)\b", re.MULTILINE)
"""Lines that give a reason: errors in Ray's C++ and Python logs, or the last line of a traceback."""


@contextmanager
def private_cluster(store: Path, init: Callable[..., None]) -> Iterator[Path]:
    """Start a cluster in a new folder that only its owner can enter, and end it after the block; yield the folder.

    Args:
        store: gets Ray's logs in `ray/failed_start` if the cluster doesn't start.
        init: starts the cluster in `_temp_dir` and connects this process to it; raises an EnvironmentFault if that fails.

    Raises:
        EnvironmentFault: it doesn't start in `STARTS` attempts; the message has Ray's reasons.
    """
    for number in range(1, STARTS + 1):
        with ExitStack() as stack:
            private = stack.enter_context(swept_folder(short_root(), TEMPORARY_PREFIX))
            stack.enter_context(guarded(private))
            scratch = private / "t"
            scratch.mkdir()
            # `ray.init` has no overall timeout; a hung call fails only once its processes are ended.
            hung = threading.Timer(SECONDS_A_START, end_processes, [private])
            hung.daemon = True
            hung.start()
            try:
                # The dashboard's fork server leaves its temporary folder behind.
                with environment({"TMPDIR": str(scratch)}):
                    init(_temp_dir=str(private / ROOT))
            except EnvironmentFault as fault:
                end_processes(private)  # so that the logs are complete
                reasons = "".join(f"\n  {line}" for line in reasons_in(_logs(private)))
                if number < STARTS:
                    say(f"{fault}{reasons}\nTrying again ({number + 1} of {STARTS}).")
                    continue
                kept = _keep_logs(private, store)
                where = "" if kept is None else f"\nRay's logs are in {kept}."
                raise EnvironmentFault(f"{fault}{reasons}{where}") from fault
            finally:
                hung.cancel()
            yield private
            return


_raylets: list[psutil.Process] = []
"""Raylets, one per node, that `has_raylet` has found among this process's children."""


def has_raylet() -> bool:
    """Return whether a node that this process has started is alive."""
    # Listing child processes reads all processes of the machine, which takes long, and this function is called every second.
    if not any(map(_lives, _raylets)):
        _raylets[:] = filter(_is_raylet, psutil.Process().children())
    return any(map(_lives, _raylets))


def _is_raylet(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "raylet" in Path((process.cmdline() or [""])[0]).name
    return False


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def reason_of(error: BaseException) -> str:
    """Return the last lines of Ray's message, where the reason is, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join((f"{type(error).__name__}:", *lines[-MESSAGE_LINES:]))


def reasons_in(logs: Mapping[str, str]) -> list[str]:
    """Return the last lines of Ray's logs that give a reason, at most `LOG_LINES`, each with the name of its file."""
    reasons = []
    for name, text in logs.items():
        lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if _REASON.search(line.strip())))
        reasons += [f"{name}: {line}" for line in lines[-MESSAGE_LINES:]]
    return reasons[:LOG_LINES]


def _logs(private: Path) -> dict[str, str]:
    """Return the logs of Ray's daemons and agents by file name; processes whose failure makes others fail come first."""
    logs: dict[str, str] = {}
    for stem in ("gcs_server", "raylet", "dashboard_agent", "runtime_env_agent", "dashboard"):
        for path in sorted(private.glob(f"{ROOT}/session_2*/logs/{stem}.*")):
            with suppress(OSError):
                logs[path.name] = path.read_text(encoding="utf-8", errors="replace")
    return logs


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
def private_cluster_settings(*, for_jobs: bool) -> Iterator[None]:
    """Make a new cluster's servers listen on 127.0.0.1 only, and the agent of its node on a free port.

    Ray listens on 127.0.0.1 by itself on systems where it doesn't support multi-node clusters. Elsewhere some ten ports
    would be open to the network, including the one for serialised code, protected only by the token.

    `ray.init` has no argument for the agent's port. By default all clusters use the same port, so that only the first one
    on a machine gets it, and the dashboards of the others take no jobs. Nor has `ray.init` an argument to leave out the
    autoscaler's and the log monitor's process, which have nothing to do if the cluster is not `for_jobs`.
    """
    from ray._private import parameter, ray_constants

    settings = {"dashboard_agent_listen_port": 0, "no_monitor": not for_jobs, "include_log_monitor": for_jobs}
    ray_params = partial(parameter.RayParams, **settings)
    with (
        # For the daemons and workers; this process has already read it.
        environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}),
        replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        replaced(parameter, "RayParams", ray_params),
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
    """Return the system's temporary folder, or /tmp if the former's path is too long for Ray's sockets or not ASCII."""
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
