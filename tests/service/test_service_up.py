"""`mlmclm up`: what it refuses, what it starts and how, and one service for real, from its start to its end."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from mlmclm.cli import up
from mlmclm.cli.up import NOT_RUNNING
from mlmclm.cluster.ray_cluster import token_path
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.service.run_service import (
    ServiceSettings,
    command,
    jobs_environment,
    prometheus_command,
    prometheus_config,
    service_status,
    start,
    submit_command,
)
from mlmclm.service.service_token import new_token, read_token
from mlmclm.service.state import ServiceState, members_of, read_state, start_of, write_service_state
from mlmclm.storage.files import machine
from mlmclm.sweeps.manifest import write_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import Planned
from small_models import save_small_model, write_sentiment
from sweep_cells import make_cell, make_cells, make_result


def write_token(path: Path, text: str = "t0\n", mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_background_s_command_line_has_all_that_was_asked_for(tmp_path: Path) -> None:
    words = command(ServiceSettings(tmp_path, {"dashboard": 1234, "mlflow": 5000}, cpus=3, mlflow="http://host"))
    assert words[:5] == [sys.executable, "-m", "mlmclm", "up", "--foreground"]
    assert words[5:] == [
        "--store", str(tmp_path), "--dashboard-port", "1234", "--mlflow-port", "5000", "--cpus", "3",
        "--mlflow", "http://host",
    ]  # fmt: skip
    assert "--web.listen-address=127.0.0.1:9090" in prometheus_command("prometheus", tmp_path, 9090)


def test_prometheus_reads_the_service_s_own_cluster_and_no_other(tmp_path: Path) -> None:
    (scraped,) = prometheus_config(tmp_path)["scrape_configs"]
    files = [file for config in scraped["file_sd_configs"] for file in config["files"]]
    assert files == [str(tmp_path / "targets.json")]


def test_jobs_find_this_store_this_server_and_this_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/first")
    found = jobs_environment(tmp_path, "http://127.0.0.1:5")
    assert found == {
        "MLMCLM_STORE": str(tmp_path),
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:5",
        "PATH": f"{Path(sys.executable).parent}:/first",
    }


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("t\n", 0o644, r"other users may read this token \(mode 644\).*chmod 600"),
        ("t\n", 0o620, "other users may read"),
        (" \n", 0o600, "this file has no token"),
        (None, 0, r"can't be read \(No such file.*mlmclm up"),
    ],
)
def test_a_token_that_cannot_be_used_is_the_users_mistake(
    tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "auth token"
    if text is not None:
        write_token(path, text, mode)
    with pytest.raises(UserError, match=f"auth token: .*{message}"):
        read_token(path)


def test_the_user_s_token_goes_before_the_store_s_and_a_new_one_is_the_last(tmp_path: Path) -> None:
    store, given = tmp_path / "store", write_token(tmp_path / "given", "from-path\n")
    assert len(new_token(store, {})) == 64 and new_token(store, {}) != new_token(store, {})
    write_token(token_path(store), "stores\n")
    assert new_token(store, {"RAY_AUTH_MODE": "token"}) == "stores"
    write_token(Path.home() / ".ray" / "auth_token", "homes\n")
    assert new_token(store, {}) == "homes", "clients look there by themselves"
    assert new_token(store, {"RAY_AUTH_TOKEN_PATH": str(given)}) == "from-path"
    assert new_token(store, {"RAY_AUTH_TOKEN_PATH": str(given), "RAY_AUTH_TOKEN": "variable"}) == "variable"
    with pytest.raises(UserError, match="RAY_AUTH_MODE=disabled"):
        new_token(store, {"RAY_AUTH_MODE": "disabled"})
    token_path(store).chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        new_token(store, {"RAY_AUTH_TOKEN": "variable"})


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"Port {port} cannot be used.*Choose another with --dashboard-port"):
            start(ServiceSettings(tmp_path / "store", {"dashboard": port}))
    with pytest.raises(UserError, match="no `prometheus` on the PATH"):
        start(ServiceSettings(tmp_path / "store", {"prometheus": port}))
    with pytest.raises(UserError, match="no MLflow server is started with --mlflow"):
        start(ServiceSettings(tmp_path / "store", {"mlflow": port}, mlflow="http://127.0.0.1:1"))
    with pytest.raises(UserError, match="postgresql://host"):
        start(ServiceSettings(tmp_path / "store", mlflow="postgresql://host"))
    with pytest.raises(EnvironmentFault, match=r"MLflow server at http://127\.0\.0\.1:1 doesn't answer"):
        start(ServiceSettings(tmp_path / "store", mlflow="http://127.0.0.1:1"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/service: cannot write .*--store"):
        start(ServiceSettings(tmp_path / "file"))
    write_token(token_path(tmp_path / "store"), mode=0o640)
    with pytest.raises(UserError, match="chmod 600"):
        start(ServiceSettings(tmp_path / "store"))


class Answers(BaseHTTPRequestHandler):
    """A dashboard that takes one token, and has a job of a user and the service's own."""

    def do_GET(self) -> None:
        about = {
            "status": "RUNNING",
            "metadata": {"user": "ada"},
            "start_time": 1000 * (time.time() - 60),
            "end_time": None,
        }
        jobs = [
            {"submission_id": "s1", "entrypoint": "python -m mlmclm study mine", **about},
            {"submission_id": "s2", "entrypoint": "echo it's", "status": "PENDING"},
            {"submission_id": None},
        ]
        group = "8a8b2c3d4e5f60718293a4b5c6d701000000"
        usage = {
            "CPU": [1.0, 2.0],
            "node:127.0.0.1": [0.0, 1.0],
            f"CPUGroup0{group[:3].title()}{group[3:]}": [0.0, 1.0],
        }
        body = (
            jobs if self.path == "/api/jobs/" else {"data": {"clusterStatus": {"loadMetricsReport": {"usage": usage}}}}
        )
        self.send_response(200 if self.headers["Authorization"] == "Bearer t0" else 403)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Nothing is written to the test's output."""


@pytest.fixture
def dashboard() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_look_tells_a_wrong_token_from_a_server_that_is_gone(
    tmp_path: Path, dashboard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    me = tuple(members_of("mlmclm", [psutil.Process()]))
    state = ServiceState(machine(), "here", 0.0, True, {"dashboard": dashboard}, me)
    write_service_state(tmp_path, state)
    token = write_token(token_path(tmp_path))
    found = service_status(tmp_path)
    assert found is not None
    assert (found.faults, found.resources, [job["submission_id"] for job in found.jobs]) == (
        [],
        {"CPU": (1, 2)},
        ["s1", "s2"],
    )
    write_manifest(tmp_path / "studies" / "mine", "mine", Planned(make_cells(3)))
    ResultsStore(tmp_path).write(make_result(make_cell(seed=1)))
    first, second = up._about(found, tmp_path)["jobs"]
    assert (first["user"], first["study"], first["done"], first["cells"]) == ("ada", "mine", 1, 3)
    assert first["seconds"] == pytest.approx(60, abs=30) and first["seconds_left"] is None
    assert (second["study"], second["cells"], second["seconds"]) == (None, None, None)
    up._print(found, tmp_path)
    shown = capsys.readouterr().out
    assert re.search(r"s1 +│ ada +│ running +│ 0:01:\d\d +│ 1 of 3 +│ – +│ mine ", shown), shown
    assert re.search(r"s2 +│ – +│ pending +│ – +│ – +│ – +│ echo it's ", shown), shown
    assert start(ServiceSettings(tmp_path)) == (state, False), "and it is left as it is"
    write_token(token, "t1\n")
    with pytest.raises(UserError, match="doesn't accept this token"):
        service_status(tmp_path)
    write_token(token)
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    write_service_state(
        tmp_path, ServiceState(machine(), "here", 0.0, True, {"dashboard": dashboard, "mlflow": gone}, me)
    )
    with pytest.raises(UserError, match=f"incomplete: MLflow doesn't answer at {gone}.*mlmclm down"):
        start(ServiceSettings(tmp_path))


@pytest.mark.parametrize(
    ("command", "study"),
    [
        ("python -m mlmclm study mine", "mine"),
        ("/bin/mlmclm study --store s --part small mine", "mine-small"),
        ("mlmclm --debug study mine.yaml recipe.batch=8 name=larger --json", "larger"),
        ("mlmclm study mine.yaml", "from-its-file"),
        ("cd x && mlmclm sweep --model a --model b --space glue", "sweep"),
        ("mlmclm sweep run --space glue --name named --model a", "named"),
        ("mlmclm sweep mine", "mine"),
        ("mlmclm study --no-such-option mine", None),
        ("mlmclm pretrain mine", None),
        ("mlmclm study", None),
        ("mlmclm", None),
        ("python train.py", None),
    ],
)
def test_a_job_s_study_is_the_one_that_its_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, study: str | None
) -> None:
    """A job with a name of its own was shown with the trials of the study whose file it took."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("name: from-its-file\nmodels: {a: x, b: y}\nspace: glue\n")
    assert up._study_of(shlex.split(command)) == study


def test_the_command_to_submit_with_survives_spaces(tmp_path: Path) -> None:
    state = ServiceState(machine(), "here", 0.0, True, {"dashboard": "http://127.0.0.1:1"}, ())
    words = submit_command(state, tmp_path / "my store")
    assert f"RAY_AUTH_TOKEN_PATH='{tmp_path / 'my store' / 'ray' / 'auth_token'}' " in words
    assert " job submit --address http://127.0.0.1:1 -- mlmclm " in words


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Any]:
    """Runs a command line in bash as in a new terminal: exit code, output, errors. A service is ended at the end."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_A", "MLFLOW_", "MLMCLM_"))
    } | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200"}

    def call(line: str) -> tuple[int, str, str]:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500
        )
        return done.returncode, done.stdout, done.stderr

    yield call
    call("mlmclm down")


@pytest.mark.slow
def test_a_service_takes_jobs_resumes_what_is_submitted_again_and_leaves_nothing(tmp_path: Path, shell: Any) -> None:
    write_sentiment(tmp_path / "data", train=60, test=20)
    save_small_model(tmp_path / "euro")
    space = {"tasks": ["sst2"], "learning_rates": [1e-3], "seeds": [0],
             "protocol": {"base": "standard", "batch_size": 8, "max_steps": 2, "max_length": 48}}  # fmt: skip
    (tmp_path / "space.yaml").write_text(json.dumps(space))
    assert shell("mlmclm status")[0] == NOT_RUNNING
    code, first, errors = shell("mlmclm up --cpus 1")
    assert code == 0, errors
    state = read_state(tmp_path / "store")
    assert state is not None and len(state.leftovers) >= 2
    code, again, errors = shell("mlmclm up")
    assert (code, again) == (0, first) and "runs already" in errors

    # The command that is printed, with a shorter verb.
    submit = first.splitlines()[-1].partition(" -- ")[0]
    sweep = f'{submit} -- mlmclm sweep --model "$PWD/euro" --space "$PWD/space.yaml" --data "$PWD/data"'
    code, log, errors = shell(sweep)
    assert code == 0, log + errors
    assert f"MLflow: runs are written to {state.addresses['mlflow']}" in log
    assert f"MLflow: {state.addresses['mlflow']}/#/experiments/1/runs?workflowType=machine_learning" in log
    assert f"Ray: connecting to {state.addresses['ray']}" in log, "and to no other cluster of this machine"
    (cell,) = (tmp_path / "store" / "cells").glob("*/*.json")
    written = cell.stat().st_mtime_ns
    code, log, errors = shell(sweep)
    assert code == 0, log + errors
    assert "report:" in log and "fine-tuning:" not in log and cell.stat().st_mtime_ns == written
    assert shell(sweep.replace("/store/ray/auth_token", "/none"))[0] != 0

    code, said, errors = shell("mlmclm status --json")
    assert code == 0, errors
    found = json.loads(said)
    assert found["running"] and found["resources"]["CPU"][1] == 1
    assert [job["status"] for job in found["jobs"]] == ["SUCCEEDED"] * 2
    processes = psutil.Process(state.members[0].pid).children(recursive=True)
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    mlflow = next(member for member in state.members if member.name == "MLflow")
    psutil.Process(mlflow.pid).kill()
    deadline = time.monotonic() + 300
    while (state := read_state(tmp_path / "store")) is not None and mlflow in state.members:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    found = service_status(tmp_path / "store")
    assert found is not None and not found.faults
    code, said, errors = shell("mlmclm down")
    assert code == 0 and "Ray" in said and "MLflow" in said, said + errors
    check_nothing_is_left(state, processes)
    assert shell("mlmclm status")[0] == NOT_RUNNING
    assert shell("mlmclm down")[0] == 0


def check_nothing_is_left(state: ServiceState, processes: list[psutil.Process]) -> None:
    assert [process for process in processes if start_of(process.pid) and process.is_running()] == []
    assert [place for place in state.leftovers if Path(place).exists()] == []


@pytest.mark.slow
def test_what_a_killed_service_leaves_is_found_named_and_ended(tmp_path: Path, shell: Any) -> None:
    code, _, errors = shell("mlmclm up --cpus 1")
    assert code == 0, errors
    state = read_state(tmp_path / "store")
    assert state is not None
    processes = psutil.Process(state.members[0].pid).children(recursive=True)
    psutil.Process(state.members[0].pid).kill()
    deadline = time.monotonic() + 300
    while start_of(state.members[0].pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for verb in ("status", "up"):
        code, _, errors = shell(f"mlmclm {verb}")
        assert code == 2 and "something still runs" in errors and "`mlmclm down`" in errors, errors
    assert shell("mlmclm down")[0] == 0
    check_nothing_is_left(state, processes)
