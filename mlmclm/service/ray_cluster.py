"""The driver's Ray session: a given cluster, or a private one on this machine.

A private cluster listens on loopback only, requires a token from every client, lives in a temporary folder, and ends
with the driver, however the driver ends: the kernel kills Ray's daemons when the process that started them (which must
do so in its main thread) dies, and workers follow their raylet.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.progress import say
from mlmclm.service.worker_environment import runtime_environment
from mlmclm.storage.files import write_atomic
from mlmclm.storage.home import find_home
from mlmclm.storage.temporary import swept_folder

TEMPORARY_PREFIX = "mlmclm-ray-"
ROOT = "r"
"""Name of Ray's root folder inside our own private folder: Ray makes its root writable for everyone."""
LONGEST_ROOT = 40
"""Ray's socket paths add up to 65 characters to its root folder, and the system allows 107."""
ANSWER_SECONDS = 5.0
OBJECT_STORE_BYTES = 256 << 20
"""Size of Ray's object store. Nothing large passes through it: corpora and results are files."""
START_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": "120",  # for its head service to listen; 30
    "RAY_gcs_rpc_server_connect_timeout_s": "60",  # for the head service to answer; 5
    "RAY_py_gcs_connect_timeout_s": "120",  # 30
    "RAY_gcs_server_request_timeout_seconds": "180",  # 60
    "RAY_raylet_start_wait_time_s": "120",  # for the node to register; 30
    "RAY_raylet_client_num_connect_attempts": "60",  # for the driver to reach the node, one second each; 10
    "RAY_agent_register_timeout_ms": "180000",  # without its two agents, Python processes, a node ends itself; 30,000
    "RAY_worker_register_timeout_seconds": "180",  # 60
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180",  # 60
}
"""Time limits of Ray's start, with Ray's defaults in the comments: a loaded machine needs longer.

The variables come from `_private/node.py`, `_private/ray_constants.py` and `src/ray/common/ray_config_def.h`.
"""
OWN_CLUSTER = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # this machine is not taken away; an actor for each training run
    "RAY_prestart_worker_first_driver": "0",  # workers without the session's runtime environment, which nothing uses
}
"""Settings that leave out processes for which a private cluster has no use. Each takes some seconds of a processor."""
STARTS = 3
"""Number of attempts to start a private cluster."""
SECONDS_A_START = 300.0
"""Seconds after which a start counts as hung, and its processes are ended so that it fails."""
SECONDS_TO_END = 5.0
"""Grace period between asking a process of a failed start to end and killing it."""
_TOKEN = "RAY_AUTH_TOKEN"
_chosen: dict[str, str] = {}
"""The token of this process's clusters, once there is one."""


@dataclass(frozen=True)
class RaySession:
    """A Ray session.

    `address` is for other Ray clients, `dashboard` is a link or None, `local` says whether the cluster is a private one,
    and `folder` is the private one's temporary folder.
    """

    address: str
    dashboard: str | None
    local: bool
    token_file: Path | None = None
    folder: Path | None = None


@contextmanager
def ray_session(
    store: Path,
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    dashboard: bool = False,
    dashboard_port: int | None = None,
    token: str | None = None,
    for_jobs: bool = False,
) -> Iterator[RaySession]:
    """Initialise Ray for the block; inside another session (or after `ray.init`), reuse that one and leave it open.

    Args:
        store: the study's store; a private cluster keeps its access token in `store/ray/auth_token`.
        address: a running cluster; None for RAY_ADDRESS, which is set inside a Ray job. Without either, a private
            cluster is started.
        num_cpus, num_gpus: the resources of a new cluster; None for those of the machine.
        dashboard: whether a new cluster starts the dashboard, on loopback.
        dashboard_port: its port; by default a free one.
        token: what a new cluster requires from its clients; None for the user's own token, else a new one.
        for_jobs: whether other programs use a new cluster too, and may need features that this package doesn't:
            workers' output in the driver, and the autoscaler's status.

    Raises:
        UserError: the address is of an unsupported kind.
        EnvironmentFault: the cluster doesn't answer, or none can be started in `STARTS` attempts.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's future default: a worker without GPUs still sees those of the node. Without a choice Ray warns on every
    # start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = cluster_address(address)
    if not address:
        for name, value in (START_LIMITS | OWN_CLUSTER).items():  # set before the import, which reads some of them
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield RaySession(ray.get_runtime_context().gcs_address, _dashboard(), local=False)
        return
    common: dict[str, Any] = {
        "runtime_env": runtime_environment(_job_environment()),
        "logging_level": logging.ERROR,
        "log_to_driver": False,  # the workers' output is in the session's log files
    }
    with ExitStack() as stack:
        token_file: Path | None = None
        folder: Path | None = None
        if address:
            check_cluster(address)
            _connect({"address": address, **common}, f"The Ray cluster at {address} cannot be used")
        else:
            token_file = _own_token(store, token)
            stack.enter_context(_own_settings(for_jobs))
            folder = private = _start(
                {
                    "address": "local",
                    "num_cpus": num_cpus,
                    "num_gpus": num_gpus,
                    "include_dashboard": dashboard,
                    "dashboard_host": "127.0.0.1",
                    "dashboard_port": dashboard_port,
                    "object_store_memory": OBJECT_STORE_BYTES,
                    **common,
                },
                stack,
            )
        # Callbacks run in reverse order: list what the daemons would leave behind, remove the discovery file, shut Ray
        # down, and only then delete the folders.
        left: list[Path] = []
        stack.callback(_remove, left)
        stack.callback(ray.shutdown)
        gcs_address = ray.get_runtime_context().gcs_address
        if not address:
            # Otherwise a submitted job joins any of this machine's clusters.
            ray._private.utils.write_ray_address(gcs_address, str(private / ROOT))
            stack.callback(_write_discovery(private).unlink, missing_ok=True)
            stack.callback(lambda: left.extend(left_behind(_daemons(private))))
        yield RaySession(gcs_address, _dashboard(), local=not address, token_file=token_file, folder=folder)


def computes_here() -> bool:
    """Return whether the current cluster's workers may run on the driver's machine."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here and node["Resources"].get("CPU") for node in ray.nodes() if node["Alive"])


def cluster_address(given: str | None) -> str | None:
    """Return the address of the running cluster to use: `--ray`, else RAY_ADDRESS (set inside a Ray job), else None."""
    return given or os.environ.get("RAY_ADDRESS") or None


def check_cluster(address: str) -> None:
    """Fail at once if nothing listens: Ray itself retries for minutes and then ends the process.

    Raises:
        UserError: this is the address of a dashboard, which accepts jobs but not drivers.
        EnvironmentFault: nothing answers there.
    """
    if "://" in address and not address.startswith("ray://"):
        raise UserError(
            f"{address!r} is not an address of a Ray cluster for --ray or RAY_ADDRESS: write HOST:PORT of its head (usually port 6379), "
            "ray://HOST:PORT (usually 10001), or auto on one of its nodes. An http:// address belongs to its dashboard, for "
            "`ray job submit --address`."
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return  # "auto", or another form that Ray looks up itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise EnvironmentFault(f"The Ray cluster at {address} doesn't answer ({error}).") from error


def _start(arguments: dict[str, Any], stack: ExitStack) -> Path:
    """Start a private cluster in a new folder that only its owner can enter; `stack` will remove it. Return the folder.

    A loaded machine can be too slow for one of Ray's start limits. A start that failed or hung leaves nothing behind
    and is retried in another folder, up to `STARTS` times in all.
    """
    for number in range(1, STARTS + 1):
        with ExitStack() as own:
            private = own.enter_context(swept_folder(short_root(), TEMPORARY_PREFIX))
            own.callback(_end_daemons, private)  # before the folder is removed, to which they write until they end
            # `ray.init` has no overall timeout; ending its daemons is what makes a hung call fail.
            hung = threading.Timer(SECONDS_A_START, _end_daemons, [private])
            hung.daemon = True
            hung.start()
            try:
                _connect({**arguments, "_temp_dir": str(private / ROOT)}, "Ray cannot be started on this machine")
            except EnvironmentFault as fault:
                if number == STARTS:
                    raise
                say(f"{fault} Trying again ({number + 1} of {STARTS}).")
                continue
            finally:
                hung.cancel()
            # The start succeeded: the caller's stack takes over the clean-up.
            stack.push(own.pop_all())
            return private
    raise AssertionError("the last try returns or raises")


def _end_daemons(folder: Path) -> None:
    """End the processes of a start in `folder`.

    `ray.shutdown` doesn't wait for them, and it doesn't know of them if `ray.init` failed.
    """
    daemons = _daemons(folder)
    # Must be read while the daemons are alive: their open sockets show the folders.
    left = left_behind(daemons)
    for daemon in daemons:
        with suppress(psutil.Error):
            daemon.terminate()
    for daemon in psutil.wait_procs(daemons, SECONDS_TO_END)[1]:
        with suppress(psutil.Error):
            daemon.kill()
    _remove(left)


def _daemons(folder: Path) -> list[psutil.Process]:
    """Return our child processes that were started for a cluster in `folder`, with their children."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(str(folder) in argument for argument in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def left_behind(daemons: list[psutil.Process]) -> list[Path]:
    """Return the temporary folders that the daemons would leave behind when Ray kills them."""
    return [place for daemon in daemons for place in _listening_in(daemon)]


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _listening_in(daemon: psutil.Process) -> list[Path]:
    """Return the temporary folders of Python's multiprocessing in which a process listens.

    They belong to the dashboard's fork server and stay behind when the process is killed.
    """
    with suppress(psutil.Error):
        sockets = [Path(str(found.laddr)) for found in daemon.net_connections("unix")]
        return [path.parent for path in sockets if path.parent.name.startswith("pymp-")]
    return []


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module for the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's SIGTERM handler during the block.

    Ray installs its own, and its C++ library one that aborts with a stack trace.
    """
    from ray._private import utils

    # Signal handlers can be set in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        with _replaced(utils, "set_sigterm_handler", lambda _: None):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@_own_sigterm()
def _connect(arguments: dict[str, Any], what: str) -> None:
    import ray

    try:
        ray.init(**arguments)
    except BaseException as error:
        ray.shutdown()
        if not isinstance(error, Exception):
            raise  # KeyboardInterrupt or SystemExit
        reason = str(error).strip().splitlines()
        raise EnvironmentFault(f"{what}: {type(error).__name__}: {reason[0] if reason else ''}") from error


def _dashboard() -> str | None:
    """Return the link to the current cluster's dashboard, or None if it has none."""
    import ray

    url = ray._private.worker.get_dashboard_url()
    return (url if "://" in url else f"http://{url}") if url else None


@contextmanager
def _own_settings(for_jobs: bool) -> Iterator[None]:
    """Make a new cluster's servers listen on 127.0.0.1 only, and the agent of its node on a free port.

    Ray does the former by itself on systems on which it doesn't support multi-node clusters. Otherwise some ten ports
    are open to the network, including the one for serialised code, protected only by the token.

    `ray.init` has no argument for the agent's port, and by default only the first cluster on a machine gets it: the
    agents of the others have none, and their dashboards then take no jobs. Nor has it one to leave out the processes of
    the autoscaler and of the log monitor, which have nothing to do if the cluster is not `for_jobs`.
    """
    from ray._private import parameter, ray_constants

    variable = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    settings = {"dashboard_agent_listen_port": 0, "no_monitor": not for_jobs, "include_log_monitor": for_jobs}
    own = partial(parameter.RayParams, **settings)
    os.environ[variable] = "0"  # for the daemons and workers; this process has already read it
    try:
        with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False), _replaced(parameter, "RayParams", own):
            yield
    finally:
        os.environ.pop(variable, None)


def _job_environment() -> dict[str, Any]:
    """Return the runtime environment that `ray job submit` gave this driver; empty outside a job."""
    config = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    found: dict[str, Any] = (json.loads(config).get("runtime_env") or {}) if config else {}
    return found


def token_path(store: Path) -> Path:
    """Return the file with the token of the clusters that are started for a store."""
    return store.resolve() / "ray" / "auth_token"


def _own_token(store: Path, token: str | None = None) -> Path | None:
    """Make the new cluster require a token, kept in the store and readable by its owner only; return its file.

    By default Ray creates a token in the home folder. An existing one is reused. If the user has set a token or an
    authentication mode in the environment, it is left to Ray (None), unless the caller gives a token. The token goes
    into this process's environment and stays there: Ray reads it once per process, and its daemons inherit it.
    """
    path = token_path(store)
    if token is not None:
        _chosen[_TOKEN] = token
    elif _TOKEN not in _chosen:
        if any(os.environ.get(name) for name in ("RAY_AUTH_MODE", _TOKEN, f"{_TOKEN}_PATH")):
            return None
        home = find_home()
        users = "" if home is None else _text_of(home / ".ray" / "auth_token")
        _chosen[_TOKEN] = users or _text_of(path) or secrets.token_hex(32)
    token = _chosen[_TOKEN]
    if _text_of(path) != token:
        # The file must never be readable by others, not even before a chmod.
        umask = os.umask(0o077)
        try:
            write_atomic(path, f"{token}\n")
        finally:
            os.umask(umask)
    # RAY_AUTH_MODE is left to ray.init, which turns tokens on for a new cluster and refreshes what it has already read.
    os.environ[_TOKEN] = token
    return path


def _text_of(file: Path) -> str:
    """Return a file's text; empty if it is missing or unreadable, such as in another user's home folder or store."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def short_root() -> Path:
    """Return the system's temporary folder, or /tmp if that is too long for Ray's sockets."""
    chosen = Path(tempfile.gettempdir()).resolve()
    return chosen if len(f"{chosen}/{TEMPORARY_PREFIX}12345678/{ROOT}") <= LONGEST_ROOT else Path("/tmp")


def _write_discovery(root: Path) -> Path:
    """Write a file that tells Prometheus where the new cluster's metrics are, and return its path.

    The file lies beside the cluster's folder, where `dashboards/prometheus.yml` looks for it. Ray writes such a file
    only with its dashboard, and into a folder that another user's Prometheus cannot enter.
    """
    import ray

    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    for abandoned in root.parent.glob(f"{TEMPORARY_PREFIX}*.json"):
        if not abandoned.with_suffix("").exists():
            with suppress(OSError):  # another user's file
                abandoned.unlink()
    path = root.with_suffix(".json")
    write_atomic(path, json.dumps([{"labels": {"job": "ray"}, "targets": targets}]) + "\n")
    return path
