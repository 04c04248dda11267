"""However a command is ended, its exit code says how, MLflow shows nothing as running, and nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml

from mlmclm.storage.files import only_one
from ray_head import RayHead, running_head
from small_mlflow import runs

MOST_SECONDS = 60
"""More than any command takes to end, but for a hang."""


class Way(NamedTuple):
    """A way to end a command: the signal, how often it comes, and the exit code that it leads to."""

    sign: signal.Signals
    times: int
    code: int


WAYS = {
    "Ctrl-C": Way(signal.SIGINT, 1, 130),
    "Ctrl-C twice": Way(signal.SIGINT, 2, 130),
    "SIGTERM": Way(signal.SIGTERM, 1, 143),
    "closed terminal": Way(signal.SIGHUP, 1, 129),
}
FAST = {("study", "Ctrl-C twice"), ("follow", "Ctrl-C"), ("ui", "Ctrl-C")}
"""Cases of the fast suite."""


@dataclass(frozen=True)
class Command:
    """A command, and what says that it is under way.

    `said` is in its output then, and MLflow's experiment `experiment`, if there is one, has a run marked as running.
    """

    words: tuple[str, ...]
    said: str
    experiment: str = ""


COMMANDS = {
    "study": Command(("study", "long.yaml"), "fine-tuning", "long"),
    "sweep": Command(("sweep", "long.yaml"), "fine-tuning", "long"),
    "pretrain": Command(("pretrain", "longer.yaml"), "loss", "longer"),
    "follow": Command(("sweep", "status", "whole.yaml", "--follow"), "cells are done"),
    "sync": Command(("tracking", "sync", "whole.yaml"), "Ctrl-C leaves them for later"),
    "ui": Command(("tracking", "ui"), "whole: http"),
    "up": Command(("up", "--foreground", "--cpus", "1"), "Submit from any shell"),
}
CASES = [
    pytest.param(command, way, marks=[] if (command, way) in FAST else [pytest.mark.slow])
    for command in COMMANDS
    for way in WAYS
]


class Place(NamedTuple):
    """The folder with the study files, and the store that all cases share: what one leaves behind, the next one meets."""

    folder: Path
    data: Path

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def started(self, command: Command, **variables: str) -> subprocess.Popen[bytes]:
        """The command in a session of its own, as a terminal has one; its output goes to `log`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_A", "MLFLOW_"))}
        # A shell's background job, which pytest may be, ignores SIGINT, and one of nohup SIGHUP; so would what it starts.
        heeded = [sys.executable, "-c", HEEDING, sys.executable, "-m", "mlmclm", *command.words]
        return subprocess.Popen(
            heeded,
            cwd=self.folder,
            env={**environment, "MLMCLM_DATA": str(self.data), "COLUMNS": "200", **variables},
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def statuses(self, experiment: str) -> Counter[str]:
        """How many runs of an experiment MLflow has in each status."""
        return Counter(run.info.status for run in runs(self.store, experiment=experiment)) if experiment else Counter()


HEEDING = """
import os, signal, sys
for sign in (signal.SIGINT, signal.SIGHUP):
    signal.signal(sign, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def place(finished_study: Any, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A finished study, one whose cells take long, and one whose pretraining does."""
    made = Place(tmp_path_factory.mktemp("shutdown"), finished_study.study.parent / "data")
    shutil.copytree(finished_study.store, made.store, symlinks=True)
    shutil.rmtree(made.store / "mlflow")
    study = yaml.safe_load(finished_study.study.read_text())
    protocol = {"batch_size": 16, "max_steps": 100_000, "max_length": 32, "stride": 8}
    space = {"tasks": ["sst2"], "learning_rates": [1e-3], "seeds": [0], "protocol": protocol}
    (made.folder / "space.yaml").write_text(yaml.safe_dump(space))
    long = {"models": ["1m-clm-30"], "baseline": None, "space": str(made.folder / "space.yaml")}
    recipe = {name: value for name, value in study["recipe"].items() if name != "revisions_every"}
    for name, changes in {
        "whole": {},
        "long": long,
        "longer": long | {"models": ["1m-clm-90k"], "recipe": recipe},
    }.items():
        (made.folder / f"{name}.yaml").write_text(yaml.safe_dump(study | changes | {"name": name}))
    done = subprocess.run(
        [sys.executable, "-m", "mlmclm", "study", "whole.yaml"],
        cwd=made.folder,
        env={**os.environ, "MLMCLM_DATA": str(made.data)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert made.statuses("whole").keys() == {"FINISHED"}
    next(path for path in (made.store / "cells").glob("*/*.json")).unlink()  # for which `--follow` waits
    return made


def until(condition: Callable[[], object], process: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@contextlib.contextmanager
def hung_server() -> Iterator[str]:
    """The address of an MLflow server that answers that it is well, and nothing else."""
    over = threading.Event()

    class Hung(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/health":
                over.wait()
            with contextlib.suppress(OSError):  # nobody waits for it any more
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"OK")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing is written to the test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hung) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        over.set()
        server.shutdown()


def family_of(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def check_nothing_is_left(place: Place, command: Command, family: list[psutil.Process]) -> None:
    """No process, and thus no socket; no folder of Ray's, no lock, and in MLflow no run that is marked as running."""
    _, alive = psutil.wait_procs(family, timeout=MOST_SECONDS)
    left = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left += [] if process.status() == psutil.STATUS_ZOMBIE else [process.cmdline()]
    assert left == []
    if command.experiment:
        with only_one(place.store / "studies" / command.experiment / ".lock", "the study"):
            pass
        found = place.statuses(command.experiment)
        assert found["KILLED"] and found.keys() <= {"KILLED", "FINISHED"}  # the latter of stages that are whole


def folders_of(family: list[psutil.Process]) -> list[Path]:
    """The folders of the private clusters that processes guard."""
    words = [process.cmdline() for process in family if process.is_running()]
    return [Path(line[-1]) for line in words if "mlmclm.cluster.cluster_guard" in line]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_command_that_is_ended_says_how_and_leaves_nothing(place: Place, name: str, how: str) -> None:
    command, way = COMMANDS[name], WAYS[how]
    with hung_server() if name == "sync" else contextlib.nullcontext("") as address:
        process = place.started(command, **({"MLFLOW_TRACKING_URI": address} if address else {}))
        family = []
        try:
            until(lambda: command.said in place.log.read_text(), process, place.log)
            if command.experiment:
                until(lambda: place.statuses(command.experiment)["RUNNING"], process, place.log)
            family = family_of(process.pid)
            folders = folders_of(family)
            for number in range(way.times):
                if number:
                    time.sleep(0.5)  # two signals at the same time would be one
                # A terminal sends its signals to all processes that it has started.
                process.send_signal(way.sign) if way.sign == signal.SIGTERM else os.killpg(process.pid, way.sign)
            process.wait(MOST_SECONDS)
        finally:
            for left in (member for member in family if process.poll() is None):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            process.kill()
            process.wait()
    said = place.log.read_text()
    assert process.returncode == way.code, said
    assert said.splitlines()[-1].startswith(f"mlmclm: interrupted ({way.sign.name})"), said
    assert "Traceback" not in said and "by itself" not in said
    assert name != "sync" or f"MLflow at {address} lacks " in said
    check_nothing_is_left(place, command, family)
    assert [folder for folder in folders if folder.exists()] == []


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with running_head() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["study", "sweep", "pretrain"])
def test_a_job_that_is_stopped_leaves_no_run_marked_as_running_and_says_nothing_untrue(
    head: RayHead, place: Place, name: str
) -> None:
    command = COMMANDS[name]
    ray = str(Path(sys.executable).with_name("ray"))
    environment = {**os.environ, **head.environment}
    job = f"{name}-{time.time_ns()}"

    def call(*words: str) -> str:
        done = subprocess.run(
            [ray, "job", *words], env=environment, capture_output=True, text=True, timeout=1500, cwd=place.folder
        )
        return done.stdout + done.stderr

    where = ("--address", head.dashboard)
    words = (sys.executable, "-m", "mlmclm", command.words[0], str(place.folder / command.words[1]))
    call("submit", *where, "--submission-id", job, "--no-wait", "--", *words,
         "--store", str(place.store), "--data", str(place.data))  # fmt: skip
    deadline = time.monotonic() + 300
    while not place.statuses(command.experiment)["RUNNING"] or command.said not in log_of(head, job):
        assert time.monotonic() < deadline, log_of(head, job)
        time.sleep(0.5)
    (driver,) = [
        process.pid
        for process in psutil.process_iter()
        if str(place.store) in (line := command_of(process)) and line[1:3] == ["-m", "mlmclm"]
    ]
    family = family_of(driver)
    assert "was stopped" in call("stop", *where, job)
    check_nothing_is_left(place, command, family)
    said = log_of(head, job)
    assert "lacks" not in said and "by itself" not in said and "Traceback" not in said, said


def log_of(head: RayHead, job: str) -> str:
    """What a job has printed so far."""
    return "".join(path.read_text() for path in head.folder.glob(f"session_2*/logs/job-driver-{job}.log"))


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def test_the_guarantees_name_each_command_and_way_with_its_exit_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    codes = {row[0]: row[1] for row in rows}
    assert {how: codes.get(how) for how in WAYS} == {how: str(way.code) for how, way in WAYS.items()}
