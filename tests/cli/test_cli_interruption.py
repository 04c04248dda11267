"""Ctrl-C and SIGTERM end a command with one message and a code of their own; nothing is left, and the same command goes on."""

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

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
MESSAGE = "mlmclm: interrupted ({}); what is finished is kept, and the same command resumes from it."
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


@pytest.fixture(autouse=True)
def heeds_ctrl_c() -> Iterator[None]:
    """A shell's background job, which pytest may be, ignores SIGINT, and so would the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("sign", "code"), SIGNALS)
def test_a_command_that_is_interrupted_says_so_and_the_same_command_goes_on(
    tmp_path: Path, ended: list[subprocess.Popen[str]], sign: signal.Signals, code: int
) -> None:
    study = write_study(tmp_path / "study")
    words = ("data", study, "--store", tmp_path / "store", "--data", study.parent / "data")
    process = start(*words, home=tmp_path)
    ended.append(process)
    assert process.stderr is not None
    while "training the tokenizer" not in (line := process.stderr.readline()):
        assert line, "ended by itself"
    process.send_signal(sign)
    _, errors = process.communicate(timeout=1500)
    assert process.returncode == code, errors
    assert errors.splitlines()[-1] == MESSAGE.format(sign.name), "and no traceback"
    if sign == signal.SIGTERM:
        code, _, errors = run(*words, home=tmp_path)
        assert code == 0, errors


@pytest.mark.parametrize(("sign", "code"), SIGNALS[1:])
def test_a_command_that_is_ended_in_a_ray_session_leaves_no_process_and_no_folder(
    tmp_path: Path, ended: list[subprocess.Popen[str]], sign: signal.Signals, code: int
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
    process.send_signal(sign)
    _, errors = process.communicate(timeout=1500)
    assert process.returncode == code, errors
    said = [line for line in errors.splitlines() if "loading libraries" not in line]
    assert said == [MESSAGE.format(sign.name)], "and nothing of Ray's"
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
