"""The service of a store: Ray's head, the MLflow server and Prometheus on one machine, started and ended together.

One process, `mlmclm up --foreground`, starts these servers, and ends them when it ends. `mlmclm up` runs it in the background. If
that process is killed, Ray ends with it (`cluster_guard`); `mlmclm down` then ends the other servers.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from mlmclm.cluster.placement import is_offered
from mlmclm.cluster.private_cluster import TEMPORARY_PREFIX
from mlmclm.cluster.ray_cluster import ray_session, token_path
from mlmclm.errors import EnvironmentFault, MlmclmError, UserError, unknown
from mlmclm.progress import say
from mlmclm.service.mlflow_server import running_server
from mlmclm.service.servers import DIRECTLY, HOST, START_SECONDS, port_for, server_process
from mlmclm.service.service_token import RESTART, new_token, read_token
from mlmclm.service.state import (
    MLFLOW,
    ServiceState,
    members_of,
    own_server,
    read_state,
    service_folder,
    start_of,
    with_children,
    write_service_state,
)
from mlmclm.storage.files import in_turn, machine, only_one, write_atomic
from mlmclm.tracking.address import VARIABLE, check_address, own_database
from mlmclm.tracking.database import make_usable, studies_of
from mlmclm.tracking.saved_views import experiment_links

SERVERS = {"dashboard": "Ray dashboard", "ray": "Ray head", "mlflow": MLFLOW, "prometheus": "Prometheus"}
"""Name of each server in a record -> its name for display."""
TARGETS = "targets.json"
"""File in the service's folder with the addresses that Prometheus scrapes."""
ERROR_PREFIX = "mlmclm: "
"""Beginning of the line in which a command reports its error."""
SECONDS_BETWEEN_LOOKS = 0.2
MOST_SECONDS_BETWEEN_STARTS = 60.0
SECONDS_TO_ANSWER = 20.0
SECONDS_A_SIGNAL = 5.0
SECONDS_TO_CLOSE = 60.0
"""Time for a service to end by itself, after which its processes are killed."""


@dataclass(frozen=True)
class ServiceSettings:
    """A service to start: its store, the ports of `SERVERS` (others get free ones), and Ray's CPUs (None: all).

    `mlflow` is the address of a running MLflow server to use; by default, one is started on the store.
    """

    store: Path
    ports: Mapping[str, int] = field(default_factory=dict)
    cpus: int | None = None
    mlflow: str | None = None


@dataclass(frozen=True)
class ServiceStatus:
    """The present state of a service: faults are sentences, and resources are (used, total) by Ray's names."""

    state: ServiceState
    faults: list[str] = field(default_factory=list)
    resources: dict[str, tuple[float, float]] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)


def start(settings: ServiceSettings) -> tuple[ServiceState, bool]:
    """Start a store's service in the background and wait until all of it answers.

    Returns:
        The service's record, and whether it was started now; a running service is left as it is.

    Raises:
        UserError: a port, the token or the store can't be used, or only a part of a service is running.
        EnvironmentFault: a server doesn't start.
    """
    folder = writable_folder(settings.store)
    with in_turn(folder / "up.lock"):
        status = service_status(settings.store)
        if status is not None and not status.faults:
            return status.state, False
        if status is not None:
            raise UserError(f"The service of {settings.store} is incomplete: {' '.join(status.faults)} {RESTART}")
        end(settings.store)  # removes files that a crash has left
        check(settings)
        log = folder / "service.log"
        say(f"starting, which takes about half a minute on an idle machine; the log is {log}")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it outlives this terminal
            )
        try:
            printed = 0
            while process.poll() is None:
                # Read before the state: the caller prints the output that the service writes once it is ready.
                new_output = log.read_bytes()[printed:]
                state = read_state(settings.store)
                if state is not None and state.ready and state.members[0].pid == process.pid:
                    return state, True
                printed += _show(new_output)
                time.sleep(SECONDS_BETWEEN_LOOKS)
        except BaseException:
            process.terminate()
            process.wait(SECONDS_TO_CLOSE)
            raise
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    kind = UserError if process.returncode == UserError.exit_code else EnvironmentFault
    raise kind(text.rpartition(ERROR_PREFIX)[2] or f"The service ended by itself with exit code {process.returncode}.")


def _show(output: bytes) -> int:
    """Print the complete lines of new output in a service's log, and return their length in bytes."""
    complete = output[: output.rfind(b"\n") + 1]
    for line in complete.decode("utf-8", errors="replace").splitlines():
        if line.startswith(ERROR_PREFIX):  # the caller raises this error when the service has ended
            break
        say(line)
    return len(complete)


def command(settings: ServiceSettings) -> list[str]:
    """Return the command line of the process that runs a service."""
    ports = [word for name, port in settings.ports.items() for word in (f"--{name}-port", str(port))]
    cpus = [] if settings.cpus is None else ["--cpus", str(settings.cpus)]
    mlflow = [] if settings.mlflow is None else ["--mlflow", settings.mlflow]
    words = ["up", "--foreground", "--store", str(settings.store), *ports, *cpus, *mlflow]
    return [sys.executable, "-m", "mlmclm", *words]


def check(settings: ServiceSettings) -> str:
    """Check the settings before anything is started; return the token.

    Raises:
        UserError: a port is taken, the token can't be used, or a port is given for Prometheus, which is not installed,
            or for MLflow, which is not started.
        EnvironmentFault: the given MLflow server doesn't answer.
    """
    if settings.mlflow is not None:
        if "mlflow" in settings.ports:
            raise UserError("--mlflow-port: no MLflow server is started with --mlflow. Leave one of the two out.")
        if not settings.mlflow.startswith(("http://", "https://")):
            raise unknown("address of an MLflow server (--mlflow)", settings.mlflow, ["http://…", "https://…"])
        check_address(settings.mlflow)
    for name in settings.ports:
        _port(settings, name)
    if "prometheus" in settings.ports and shutil.which("prometheus") is None:
        raise UserError("--prometheus-port: there is no `prometheus` on the PATH. Install it, or leave the option out.")
    return new_token(settings.store, os.environ)


def submit_command(state: ServiceState, store: Path) -> str:
    """Return the shell command that submits a job to a service."""
    ray = Path(sys.executable).with_name("ray")
    program = "ray" if shutil.which("ray") == str(ray) else shlex.quote(str(ray))
    return (
        f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shlex.quote(str(token_path(store)))} "
        f'{program} job submit --address {state.addresses["dashboard"]} -- mlmclm study "$PWD/STUDY.yaml"'
    )


def study_links(state: ServiceState, store: Path) -> dict[str, str]:
    """Return a link to the list of experiments on a service's MLflow server, and links to the studies if it serves the store's database."""
    address, studies = state.addresses.get("mlflow"), dict[str, str]()
    with suppress(sqlite3.Error):  # there is no database yet, or it is damaged
        studies = studies_of(own_database(store)) if address == own_server(store) else {}
    return {} if address is None else experiment_links(address, {}) | experiment_links(address, studies)


def run(settings: ServiceSettings, on_ready: Callable[[ServiceState], None]) -> None:
    """Run a store's service until this process is interrupted.

    Raises:
        UserError: as for `start`, or a service runs already.
        EnvironmentFault: a server doesn't start.
    """
    store = settings.store
    folder = writable_folder(store)
    with ExitStack() as stack:
        stack.enter_context(only_one(folder / "service.lock", f"The service of {store}"))
        earlier = read_state(store)
        if earlier is not None and earlier.alive():
            raise UserError(f"A part of an earlier service of {store} still runs. {RESTART}")
        token = check(settings)
        me = tuple(members_of("mlmclm", [psutil.Process()]))
        state = ServiceState(machine(), platform.node(), time.time(), False, {}, me)
        write_service_state(store, state)
        stack.callback((folder / "state.json").unlink, missing_ok=True)
        # The addresses in a killed service's file may be another cluster's by now.
        stack.callback((folder / TARGETS).unlink, missing_ok=True)
        (folder / TARGETS).unlink(missing_ok=True)
        server = stack.enter_context(ExitStack())
        mlflow: subprocess.Popen[bytes] | None = None
        names: dict[int, str] = {}
        if settings.mlflow is None:
            make_usable(own_database(store), own=True)
            port = _port(settings, "mlflow")
            _, mlflow = server.enter_context(running_server(store, port=port))
            names[mlflow.pid] = MLFLOW
        addresses = {"mlflow": settings.mlflow.rstrip("/") if settings.mlflow else f"http://{HOST}:{port}"}
        state = _record(store, state, addresses, names)
        if (program := shutil.which("prometheus")) is not None:
            addresses["prometheus"], process = stack.enter_context(_prometheus(program, folder, settings))
            names[process.pid] = "Prometheus"
            state = _record(store, state, addresses, names)
        os.environ.update(jobs_environment(store, addresses["mlflow"]))
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            os.environ.pop(name, None)
        say("Ray is starting")
        session = stack.enter_context(
            ray_session(
                store,
                num_cpus=settings.cpus,
                dashboard=True,
                dashboard_port=settings.ports.get("dashboard"),
                token=token,
                for_jobs=True,
            )
        )
        assert session.dashboard is not None and session.folder is not None
        addresses |= {"dashboard": session.dashboard, "ray": session.address}
        leftovers = (session.folder, session.folder.with_suffix(".json"))
        write_atomic(folder / TARGETS, leftovers[1].read_text(encoding="utf-8"))
        _wait_for_jobs(session.dashboard, token)
        state = _record(store, replace(state, ready=True, leftovers=tuple(map(str, leftovers))), addresses, names)
        on_ready(state)
        # Jobs need MLflow only for display, so its end must not end the service and with it the jobs.
        failures, last_error = 0, ""
        while True:
            time.sleep(min(SECONDS_BETWEEN_LOOKS * 2 ** min(failures, 20), MOST_SECONDS_BETWEEN_STARTS))
            if mlflow is not None and mlflow.poll() is not None:
                if not failures:
                    say(f"MLflow has ended with exit code {mlflow.returncode}; it is started again")
                server.close()
                names.pop(mlflow.pid, None)
                try:
                    _, mlflow = server.enter_context(running_server(store, port=port))
                except MlmclmError as error:  # such as a port that old MLflow processes still hold
                    failures += 1
                    if str(error) != last_error:
                        last_error = str(error)
                        say(last_error)
                    continue
                failures, last_error = 0, ""
                names[mlflow.pid] = MLFLOW
                state = _record(store, state, addresses, names)


def jobs_environment(store: Path, mlflow: str) -> dict[str, str]:
    """Return the variables that all jobs get: the store, the MLflow server, and this installation's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"MLMCLM_STORE": str(store.resolve()), VARIABLE: mlflow, "PATH": path}


def service_status(store: Path) -> ServiceStatus | None:
    """Return a store's service as it is now, or None if none of it runs.

    Raises:
        UserError: the service is another machine's, or the token can't be used.
    """
    state = read_state(store)
    alive = state.alive() if state is not None else []
    if state is None or not alive:
        return None
    if state.members[0] not in alive:
        names = ", ".join(sorted({member.name for member in alive}))
        return ServiceStatus(state, [f"The process that started it has ended, and something still runs ({names})."])
    if not state.ready:
        return ServiceStatus(state, ["It is still starting."])
    token = read_token(token_path(store))
    faults, resources, jobs = [], {}, []
    for name, path in (("mlflow", "/health"), ("prometheus", "/-/ready")):
        if (address := state.addresses.get(name)) is not None:
            try:
                _ask(address + path)
            except OSError as error:
                faults.append(f"{SERVERS[name]} doesn't answer at {address} ({error}).")
    dashboard = state.addresses["dashboard"]
    try:
        jobs = json.loads(_ask(f"{dashboard}/api/jobs/", token))
        status = json.loads(_ask(f"{dashboard}/api/cluster_status", token))["data"]["clusterStatus"] or {}
        usage = (status.get("loadMetricsReport") or {}).get("usage") or {}
        resources = {name: tuple(amounts) for name, amounts in usage.items() if is_offered(name)}
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
            raise UserError(
                f"{token_path(store)}: the service doesn't accept this token, because it was started with another "
                f"one. Put that one back, or restart: {RESTART}"
            ) from error
        faults.append(f"{SERVERS['dashboard']} doesn't answer at {dashboard} ({error}).")
    # Ray lists the service's own process as a job too; it has no submission id.
    return ServiceStatus(state, faults, resources, [job for job in jobs if job["submission_id"]])


def end(store: Path) -> list[str]:
    """End a store's service and the jobs in it, remove their leftovers, and return the names of what ran.

    Raises:
        UserError: the service is another machine's.
        EnvironmentFault: some of it can't be ended.
    """
    state = read_state(store)
    if state is None:
        return []
    alive = state.alive()
    processes = with_children(alive)
    # The first member ends the others, so end it first.
    if processes and state.members[0] in alive:
        _end(processes[:1], signal.SIGTERM, SECONDS_TO_CLOSE)
    # Ray's supervisor of a job looks every second and ends the job's processes, so wait once before sending signals.
    for sign in (None, signal.SIGTERM, signal.SIGKILL):
        processes = _end(processes, sign, SECONDS_A_SIGNAL)
    if processes:
        raise EnvironmentFault(f"Processes {', '.join(str(p.pid) for p in processes)} of the service don't end.")
    for path in map(Path, state.leftovers):
        if path.name.startswith(TEMPORARY_PREFIX):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    (service_folder(store) / "state.json").unlink(missing_ok=True)
    return sorted({member.name for member in alive})


def _end(processes: Sequence[psutil.Process], sign: signal.Signals | None, seconds: float) -> list[psutil.Process]:
    """Send a signal, if any, to processes, and wait for their end; return those that still run."""
    if sign is not None:
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(sign)  # psutil refuses if the id is another process's by now
    deadline = time.monotonic() + seconds
    # An ended process keeps its id until its parent waits for it, which some containers' first process never does.
    while processes := [process for process in processes if start_of(process.pid) is not None and process.is_running()]:
        if time.monotonic() > deadline:
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return processes


def writable_folder(store: Path) -> Path:
    """Create the service's folder in the store, and return it.

    Raises:
        UserError: the store is not writable.
    """
    folder = service_folder(store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "up.lock").open("a").close()
    except OSError as error:
        raise UserError(f"{folder}: cannot write ({error.strerror}). Choose another folder with --store.") from error
    return folder


def prometheus_command(program: str, folder: Path, port: int) -> list[str]:
    """Return the command line of a Prometheus that keeps its data in a folder."""
    return [
        *(program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'prometheus'}"),
        *(f"--web.listen-address={HOST}:{port}", "--log.level=warn"),
    ]


def prometheus_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a Prometheus that scrapes the service's own cluster, and no other of this machine."""
    scraped = {
        "job_name": "ray",
        "honor_labels": True,  # a job can use another store than the service's
        "file_sd_configs": [{"files": [str(folder / TARGETS)], "refresh_interval": "5s"}],
    }
    return {"global": {"scrape_interval": "5s", "evaluation_interval": "15s"}, "scrape_configs": [scraped]}


@contextmanager
def _prometheus(program: str, folder: Path, settings: ServiceSettings) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run Prometheus for the duration of the block; yield its address and its process."""
    port = _port(settings, "prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(prometheus_config(folder)), encoding="utf-8")
    address = f"http://{HOST}:{port}"
    with server_process(
        prometheus_command(program, folder, port), "Prometheus", f"{address}/-/ready", folder / "prometheus.log"
    ) as process:
        yield address, process


def _port(settings: ServiceSettings, name: str) -> int:
    return port_for(settings.ports.get(name), f"--{name}-port")


def _record(store: Path, state: ServiceState, addresses: Mapping[str, str], names: Mapping[int, str]) -> ServiceState:
    """Write the record of this process and its descendants; `names` has names by the child's id, and other children are Ray's."""
    members = [state.members[0]]
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            members += members_of(names.get(child.pid, "Ray"), [child, *child.children(recursive=True)])
    state = replace(state, addresses=dict(addresses), members=tuple(members))
    write_service_state(store, state)
    return state


def _wait_for_jobs(dashboard: str, token: str) -> None:
    """Wait until Ray's dashboard takes jobs, which is some time after it has an address."""
    say(f"Ray is up: waiting up to {START_SECONDS:.0f} s until its dashboard takes jobs")
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            _ask(f"{dashboard}/api/jobs/", token)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"Ray's dashboard at {dashboard} takes no jobs after {START_SECONDS:.0f} s ({error})."
                ) from error
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _ask(url: str, token: str | None = None) -> str:
    """Return the answer to a request, with the token if there is one.

    Raises:
        OSError: nothing answers, or the answer is an error (`urllib.error.HTTPError`).
    """
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with DIRECTLY.open(request, timeout=SECONDS_TO_ANSWER) as answer:
        return str(answer.read().decode())
