"""SIGTERM ends a command with one message and a code of its own; nothing is left, and the same command goes on.

`test_cli_shutdown.py` has Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlmclm.cli import interruption
from small_study import run, start, write_study

MESSAGE = "mlmclm: interrupted (SIGTERM); what is finished is kept, and the same command resumes from it."
WAITING_VERB = """
import sys, time
from pathlib import Path
import ray
from mlmclm.cli.main import app, main
from mlmclm.cluster.ray_cluster import ray_session

@ray.remote
def wait():
    time.sleep(600)

@app.command("wait")
def verb(store: Path):
    with ray_session(store, num_cpus=1):
        print(ray._private.worker._global_node.get_temp_dir_path(), flush=True)
        ray.get(wait.remote())

main(["wait", sys.argv[1]])
"""


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_a_command_that_is_interrupted_says_so_and_the_same_command_goes_on(
    tmp_path: Path, ended: list[subprocess.Popen[str]]
) -> None:
    study = write_study(tmp_path / "study")
    words = ("data", study, "--store", tmp_path / "store", "--data", study.parent / "data")
    process = start(*words, home=tmp_path)
    ended.append(process)
    assert process.stderr is not None
    while "training the tokenizer" not in (line := process.stderr.readline()):
        assert line, "ended by itself"
    process.terminate()
    _, errors = process.communicate(timeout=1500)
    assert process.returncode == 143, errors
    assert errors.splitlines()[-1] == MESSAGE, "and no traceback"
    code, _, errors = run(*words, home=tmp_path)
    assert code == 0, errors


def test_a_command_that_is_ended_in_a_ray_session_leaves_no_process_and_no_folder(
    tmp_path: Path, ended: list[subprocess.Popen[str]]
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING_VERB, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    ended.append(process)
    assert process.stdout is not None
    root = Path(process.stdout.readline().strip())
    assert root.is_dir()
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    _, errors = process.communicate(timeout=1500)
    assert process.returncode == 143, errors
    said = [line for line in errors.splitlines() if "loading libraries" not in line]
    assert said == [MESSAGE], "and nothing of Ray's"
    assert not root.parent.exists()
    _, alive = psutil.wait_procs(family, timeout=1500)
    assert [member for member in alive if member.status() != psutil.STATUS_ZOMBIE] == []


def test_a_second_sigterm_spares_the_closing_and_ends_what_the_first_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with interruption.ended_by_signals() as received:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(interruption, "SECONDS_TO_CLOSE", 0.0)  # which have passed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert received.exit_code == 143
