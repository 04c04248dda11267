"""The driver's Ray session: a given cluster, or a private one on this machine.

A private cluster listens on loopback only, requires a token from every client, lives in a temporary folder, and ends
with the driver, however the driver ends: the kernel kills Ray's daemons when the process that started them dies (it must
start them in its main thread), workers end with their raylet, and `cluster_guard` ends the other processes.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlmclm.cluster.cluster_guard import NODE_HAS_DIED, RESUMES
from mlmclm.cluster.live_metrics import ascii_label
from mlmclm.cluster.private_cluster import (
    ROOT,
    START_LIMITS,
    has_raylet,
    private_cluster,
    private_cluster_settings,
    reason_of,
    replaced,
    sweep_clusters,
)
from mlmclm.cluster.worker_environment import runtime_environment
from mlmclm.environment import environment
from mlmclm.errors import LONGEST_SHOWN, EnvironmentFault, UserError, one_line
from mlmclm.progress import say
from mlmclm.storage.files import write_atomic
from mlmclm.storage.home import find_home

START_LIMIT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
"""Environment variable with Ray Train's limit for a start of all workers of a stage."""
ANSWER_SECONDS = 5.0
OBJECT_STORE_BYTES = 256 << 20
"""Size of Ray's object store. Nothing large passes through it: corpora and results are files."""
OWN_CLUSTER = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # this machine is not preempted; the watcher is an actor for each training run
    "RAY_prestart_worker_first_driver": "0",  # these workers lack the session's runtime environment, so nothing would use them
}
"""Settings that leave out processes for which a private cluster has no use. Each takes some seconds of a processor."""
ADDRESS, LOCAL, AUTO, CLIENT = "RAY_ADDRESS", "local", "auto", "ray://"
"""Ray's variable for the address of a cluster, the words allowed in place of an address, and the scheme of Ray Client."""
_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_chosen: dict[str, str] = {}
"""The token of this process's clusters, by its variable; empty until a token is chosen."""

Session = Callable[[], AbstractContextManager[Any]]
"""Callable that opens a Ray session, or joins an open one."""


class LostNode(EnvironmentFault):
    """Ray's node on this machine has died, which ends the cluster that this process has started."""


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


_opened: list[RaySession] = []
"""The session that this process has opened or found open, while it is used; `local` if this process has started its node."""


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
        address: a running cluster; None for RAY_ADDRESS, which is set inside a Ray job. Without either, or for
            `local`, a private cluster is started.
        num_cpus, num_gpus: the resources of a new cluster; None for those of the machine.
        dashboard: whether a new cluster starts the dashboard, on loopback.
        dashboard_port: its port; by default a free one.
        token: the token that a new cluster requires from clients; None for the user's token, or a new one if there is none.
        for_jobs: whether other programs use a new cluster too, and may need features that this package doesn't:
            workers' output in the driver, and the autoscaler's status.

    Raises:
        UserError: the address is of an unsupported kind.
        EnvironmentFault: the cluster doesn't answer, or none can be started (`private_cluster`).
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's future default: a worker without GPUs still sees those of the node. If the variable is not set, Ray warns on
    # every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = cluster_address(address)
    if not address:
        for name, value in (START_LIMITS | OWN_CLUSTER).items():  # set before the import, which reads some of them
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        joined = RaySession(
            ray.get_runtime_context().gcs_address, _opened[0].dashboard if _opened else None, local=False
        )
        with ExitStack() as stack:
            if not _opened:  # the caller's own `ray.init`, which may have started a node
                _opened.append(replace(joined, local=has_raylet()))
                stack.callback(_opened.clear)
            yield joined
        return
    common: dict[str, Any] = {
        "runtime_env": runtime_environment(_job_environment()),
        "logging_level": logging.ERROR,
        "log_to_driver": False,  # the workers' output is in the session's log files
    }
    with ExitStack() as stack:
        token_file: Path | None = None
        folder: Path | None = None
        dashboard_url: str | None = None
        if address:
            check_cluster(address)
            with environment({ADDRESS: address}):  # Ray uses this variable if the address is `auto`
                dashboard_url = _connect({"address": address, **common}, f"The Ray cluster at {address} cannot be used")
        else:
            token_file = _own_token(store, token)
            # Ray's own processes have a TMPDIR that is removed with the cluster; caches of compiled code must outlive it.
            common["runtime_env"]["env_vars"].setdefault("TMPDIR", tempfile.gettempdir())
            arguments = {
                "address": "local",
                "num_cpus": num_cpus,
                "num_gpus": num_gpus,
                "include_dashboard": dashboard,
                "dashboard_host": "127.0.0.1",
                "dashboard_port": dashboard_port,
                "object_store_memory": OBJECT_STORE_BYTES,
                **common,
            }

            def start(**further: Any) -> None:
                nonlocal dashboard_url
                with private_cluster_settings(for_jobs=for_jobs), environment({ADDRESS: None}):
                    dashboard_url = _connect(arguments | further, "Ray cannot be started on this machine")

            folder = stack.enter_context(private_cluster(store, start))
        stack.callback(ray.shutdown)
        gcs_address = ray.get_runtime_context().gcs_address
        session = RaySession(gcs_address, dashboard_url, local=not address, token_file=token_file, folder=folder)
        _opened.append(session)
        stack.callback(_opened.clear)
        stack.enter_context(explain_ray_failures())
        if folder is not None:
            # Without this file, a submitted job would join any of this machine's clusters.
            ray._private.utils.write_ray_address(gcs_address, str(folder / ROOT))
            stack.callback(_write_discovery(folder, store).unlink, missing_ok=True)
        yield session


@contextmanager
def explain_ray_failures() -> Iterator[None]:
    """Replace an error in the block by one that reports that Ray has failed, if that is the cause.

    Raises:
        LostNode: the node that this process has started is dead.
        EnvironmentFault: another error of Ray itself, not of a task.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        try:
            check_node()
        except LostNode as lost:
            raise lost from error
        from ray.exceptions import RayError, RayTaskError

        if isinstance(error, RayError) and not isinstance(error, RayTaskError):
            reason = f"{type(error).__name__}: {one_line(error, LONGEST_SHOWN)}"
            raise EnvironmentFault(f"The Ray cluster has failed ({reason}). {RESUMES}") from error
        raise


def check_node() -> None:
    """Fail if the node that this process has started is dead: Ray would end the process at the next task, without a message.

    Raises:
        LostNode: the node is dead.
    """
    if started_here() and not has_raylet():
        raise LostNode(NODE_HAS_DIED)


def computes_here() -> bool:
    """Return whether workers of the current cluster may run on the driver's machine."""
    import ray

    this_node = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == this_node and node["Resources"].get("CPU") for node in ray.nodes() if node["Alive"])


def cluster_address(option: str | None) -> str | None:
    """Return the address of the running cluster to use: `--ray`, else RAY_ADDRESS, which is set inside a Ray job.

    Return None if a cluster is to be started on this machine, as for the address `local`, which means this everywhere in Ray.
    """
    address = (option or "").strip() or os.environ.get(ADDRESS, "").strip()
    return None if address in ("", LOCAL) else address


def check_cluster(address: str) -> None:
    """Fail at once if nothing listens at an address: Ray itself retries for minutes and then ends the process.

    Raises:
        UserError: this is no address, or that of a dashboard, which accepts jobs but not drivers.
        EnvironmentFault: nothing answers there.
    """
    if address == AUTO:
        return
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise UserError(
            f"{address!r} is not an address of a Ray cluster for --ray or {ADDRESS}: write HOST:PORT of its head (usually port 6379), "
            f"{CLIENT}HOST:PORT (usually 10001), {AUTO} on one of its nodes, or {LOCAL} to start one on this machine. An http:// address belongs "
            "to its dashboard, for `ray job submit --address`."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise EnvironmentFault(f"The Ray cluster at {address} doesn't answer ({error}).") from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this process's SIGTERM handler during the block, and block SIGHUP for the processes started in it.

    Ray installs its own SIGTERM handler, and its C++ library installs one that aborts with a stack trace. A closed terminal sends
    SIGHUP to all processes. If SIGHUP ended the daemons first, this process could not close its session properly.
    """
    from ray._private import utils

    # Signal handlers can be set in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # which new processes inherit
    try:
        with replaced(utils, "set_sigterm_handler", lambda _: None):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@_signals_kept()
def _connect(arguments: dict[str, Any], what: str) -> str | None:
    """Connect this process to a cluster; return the link to its dashboard, or None if it has none."""
    import ray

    try:
        url = ray.init(**arguments).dashboard_url
    except BaseException as error:
        ray.shutdown()
        if not isinstance(error, Exception):
            raise  # KeyboardInterrupt or SystemExit
        raise EnvironmentFault(f"{what}: {reason_of(error)}") from error
    return (url if "://" in url else f"http://{url}") if url else None


def lasting_dashboard() -> str | None:
    """Return the link to the dashboard of the running cluster that this process has joined, if any.

    A cluster that this process has started ends with it, and its dashboard too.
    """
    return _opened[0].dashboard if _opened and not started_here() else None


def started_here() -> bool:
    """Return whether this process has started the current cluster, which then consists of this machine alone."""
    return bool(_opened) and _opened[0].local


def _job_environment() -> dict[str, Any]:
    """Return the runtime environment that `ray job submit` gave this driver; empty outside a job."""
    config = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    runtime_env: dict[str, Any] = (json.loads(config).get("runtime_env") or {}) if config else {}
    return runtime_env


def token_path(store: Path) -> Path:
    """Return the file with the token of the clusters that are started for a store."""
    return store.resolve() / "ray" / "auth_token"


def _own_token(store: Path, token: str | None = None) -> Path | None:
    """Make the new cluster require a token, kept in the store and readable by its owner only; return its file.

    By default Ray creates a token in the home folder; if there is one, it is reused. If the user has set a token or turned
    tokens off in the environment, Ray decides, and this returns None, unless the caller gives a token. The token goes into this
    process's environment and stays there: Ray reads it once per process, and its daemons inherit it.
    """
    path = token_path(store)
    if token is not None:
        _chosen[_TOKEN] = token
    elif _TOKEN not in _chosen:
        if (mode := os.environ.get(_MODE) or "token").lower() != "token":
            say(f"{_MODE}={mode}: Ray asks for no token, so that other users of this machine can run programs as you.")
            return None
        if any(os.environ.get(name) for name in (_TOKEN, f"{_TOKEN}_PATH")):
            return None
        home = find_home()
        user_token = "" if home is None else _text_of(home / ".ray" / "auth_token")
        _chosen[_TOKEN] = user_token or _text_of(path) or secrets.token_hex(32)
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


def _write_discovery(folder: Path, store: Path) -> Path:
    """Write a file that tells Prometheus where the new cluster's metrics are, and return its path.

    The file lies beside the cluster's folder, where `dashboards/prometheus.yml` looks for it. Ray writes such a file
    only with its dashboard, and into a folder that another user's Prometheus cannot enter.
    """
    import ray

    sweep_clusters()
    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    path = folder.with_suffix(".json")
    labels = {"job": "ray", "store": ascii_label(store.resolve())}
    write_atomic(path, json.dumps([{"labels": labels, "targets": targets}]) + "\n")
    return path


def prepare_environment() -> None:
    """Set the environment variables that Ray Train reads in the driver; call before the first `run_stage`."""
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # the dashboard's page of train runs needs it
    # The autoscaler takes minutes to start a node. After the default timeout Ray Train would only make the same
    # request again.
    os.environ.setdefault(START_LIMIT, "600")
    # The controller notices the end of a stage at its next poll, so poll more often than by default. Even more polls would
    # cost too much: each takes the workers' cores for some milliseconds.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
