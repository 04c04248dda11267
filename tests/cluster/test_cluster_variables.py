"""Variables of Ray, MLflow, the Hub and proxies: whatever they say, what we start is closed, and messages name what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import requests
from ray._private import services

from listening import is_loopback
from mlmclm.cli.main import main
from mlmclm.cluster.ray_cluster import cluster_address, ray_session
from mlmclm.environment import NO_PROXY, OWN_HOSTS, set_library_defaults
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.tracking.address import check_address
from small_mlflow import client, runs

FOREIGN = ("RAY_ADDRESS", "RAY_AUTH", "MLFLOW_", "HF_")
"""Beginnings of the variables that tests set."""
SESSION = """
import sys, time
from pathlib import Path
import ray
from mlmclm.cli.main import app, main
from mlmclm.cluster.ray_cluster import ray_session

@app.command("wait")
def verb(store: Path, address: str):
    with ray_session(store, address=address, num_cpus=1) as session:
        ray.get(ray.remote(lambda: 1).remote())
        print(session.local, flush=True)
        time.sleep(600)

main(["wait", *sys.argv[1:]])
"""
PROXIED = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@contextmanager
def answering() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that answers everything with OK, and the paths that it was asked for."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"OK")

        do_POST = do_CONNECT = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing is written to the test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what tests set, and with these."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return own | variables


def listening(pid: int) -> set[str]:
    """The addresses on which a process and its descendants listen."""
    found = set()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.Error):
            connections = process.net_connections("inet")
            found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return found


STARTS = {
    "local, and all that is no business of ours": ("", {
        "RAY_ADDRESS": "local", "MLFLOW_TRACKING_URI": "http://127.0.0.1:1", "MLFLOW_TRACKING_TOKEN": "t",
        "MLFLOW_RUN_ID": "0" * 32, "MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_EXPERIMENT_NAME": "other",
        "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_t",
    }),
    "--ray local, and a dead address": ("local", {"RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_MODE": "token"}),
    "empty": ("", {"RAY_ADDRESS": " ", "RAY_AUTH_MODE": ""}),
    "no token wanted": ("", {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled"}),
}  # fmt: skip


@pytest.mark.parametrize("name", [name if not number else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(STARTS)])  # fmt: skip
def test_a_cluster_that_is_started_here_is_on_loopback_with_a_token_and_ends_with_sigterm(
    tmp_path: Path, name: str
) -> None:
    address, variables = STARTS[name]
    with answering() as (proxy, asked):
        process = subprocess.Popen(
            [sys.executable, "-c", SESSION, str(tmp_path / "store"), address],
            env=environment(**variables, **dict.fromkeys(PROXIED, proxy), RAY_gcs_rpc_server_reconnect_timeout_s="36000"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "True\n", process.communicate()
            found = listening(process.pid)
            assert found and all(map(is_loopback, found)), found
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=1500)  # less than the time for which it would hang
        finally:
            process.kill()
    assert process.returncode == 143, errors
    _, alive = psutil.wait_procs(family, timeout=1500)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    own = [each for each in asked if re.search(r"127\.|localhost|\[::1\]", each)]
    assert own == [], "the proxy is left out for this machine"
    token = tmp_path / "store" / "ray" / "auth_token"
    if variables.get("RAY_AUTH_MODE") == "disabled":
        assert "RAY_AUTH_MODE=disabled: Ray asks for no token" in errors
    else:
        assert token.stat().st_mode & 0o077 == 0 and len(token.read_text()) > 60


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        ("127.0.0.1:1", EnvironmentFault, r"The Ray cluster at 127\.0\.0\.1:1 doesn't answer"),
        ("ray://127.0.0.1:1", EnvironmentFault, r"The Ray cluster at ray://127\.0\.0\.1:1 doesn't answer"),
        ("nobody.invalid:6379", EnvironmentFault, r"nobody\.invalid:6379 doesn't answer"),
        ("127.0.0.1:99999", EnvironmentFault, "doesn't answer"),
        ("http://127.0.0.1:8265", UserError, "belongs to its dashboard"),
        ("Local", UserError, r"'Local' is not an address .* or local to start one"),
        ("127.0.0.1", UserError, "HOST:PORT"),
        ("ray://127.0.0.1", UserError, "HOST:PORT"),
        ("ray://", UserError, "HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_used_is_named_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, kind: type[Exception], words: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(kind, match=words), ray_session(tmp_path):
        raise AssertionError("started")
    assert not ray.is_initialized() and not (tmp_path / "ray").exists()


@pytest.mark.parametrize("variable", ["local", "127.0.0.1:1", "auto"])
def test_auto_finds_a_cluster_or_says_that_there_is_none_whatever_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(
        services, "find_gcs_addresses", cache(set)
    )  # other clusters of this machine are no business of ours
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
    words = "The Ray cluster at auto cannot be used: ConnectionError: Could not find any running Ray instance"
    with pytest.raises(EnvironmentFault, match=words), ray_session(tmp_path, address="auto"):
        raise AssertionError("started")
    assert os.environ["RAY_ADDRESS"] == variable and not ray.is_initialized()


def test_the_argument_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "one:1")
    assert [cluster_address(given) for given in (None, "", "local", "two:2")] == ["one:1", "one:1", None, "two:2"]


@pytest.mark.parametrize(
    "known", [{}, {"no_proxy": "example.org"}, {"NO_PROXY": "example.org, *.org"}, {"no_proxy": "*"}]
)
@pytest.mark.parametrize("name", PROXIED)
def test_a_proxy_is_not_used_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, name: str, known: dict[str, str]
) -> None:
    for other in (*PROXIED, *NO_PROXY):
        monkeypatch.setenv(other, "")
        monkeypatch.delenv(other)
    for other, value in known.items():
        monkeypatch.setenv(other, value)
    with answering() as (proxy, by_proxy), answering() as (server, asked):
        monkeypatch.setenv(name, proxy)
        set_library_defaults()
        check_address(server)
        assert requests.get(f"{server}/x", timeout=1500).text == "OK"
        assert (asked, by_proxy) == (["/health", "/x"], [])
        if known.get("no_proxy") != "*":
            assert not urllib.request.proxy_bypass_environment("elsewhere.net"), "for others it is"
            assert all(urllib.request.proxy_bypass_environment(host) for host in OWN_HOSTS)


def test_without_a_proxy_no_variable_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (*PROXIED, *NO_PROXY):
        monkeypatch.delenv(other, raising=False)
    set_library_defaults()
    assert not set(NO_PROXY) & os.environ.keys()


def sync(finished: Any, store: Path) -> list[str]:
    """The words of `mlmclm tracking sync` of a finished study."""
    places = ("--store", store, "--data", finished.study.parent / "data")
    return ["tracking", "sync", *map(str, (finished.study, *places))]


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://nobody.invalid:5000", "nonsense"])
def test_an_mlflow_server_that_does_not_answer_is_named_with_its_variable(
    finished_study: Any,
    tmp_path: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "store"
    store.symlink_to(finished_study.store)
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with pytest.raises(SystemExit) as ended:
        main(sync(finished_study, store))
    errors = capfd.readouterr().err
    assert ended.value.code in (1, 2), errors
    assert "MLFLOW_TRACKING_URI: " in errors and address in errors
    assert "Unset MLFLOW_TRACKING_URI to write to the store." in errors and "Traceback" not in errors


def test_mlflow_s_other_variables_change_nothing(finished_study: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished_study.store, store, symlinks=True)
    shutil.rmtree(store / "mlflow")
    with answering() as (proxy, asked):
        variables = environment(
            MLFLOW_RUN_ID="0" * 32, MLFLOW_EXPERIMENT_ID="7", MLFLOW_EXPERIMENT_NAME="other", MLFLOW_TRACKING_TOKEN="t",
            MLFLOW_REGISTRY_URI=proxy, HF_ENDPOINT=proxy, HF_TOKEN="hf_t", **dict.fromkeys(PROXIED, proxy),
        )  # fmt: skip
        words = [sys.executable, "-m", "mlmclm", *sync(finished_study, store)]
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=1500)
    assert (done.returncode, asked) == (0, []), done.stderr
    assert {run.info.status for run in runs(store, experiment="small")} == {"FINISHED"}
    assert {each.name for each in client(store).search_experiments()} == {"Default", "small"}


HUB = ["sweep", "--model", "nobody/nothing", "--task", "sst2", "--space", "glue", "--store"]


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "hf")}
    words = [sys.executable, "-m", "mlmclm", *HUB, str(tmp_path)]
    done = subprocess.run(words, env=environment(**variables), capture_output=True, text=True, timeout=1500)
    assert done.returncode in (1, 2) and "127.0.0.1:1" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_variable_that_forbids_to_ask_the_hub_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:  # as conftest.py has set it
        main([*HUB, str(tmp_path)])
    errors = capfd.readouterr().err
    assert ended.value.code in (1, 2) and "HF_HUB_OFFLINE" in errors and "Traceback" not in errors, errors


AFTERWARDS = """
from mlmclm.cli.main import app, main

@app.command("afterwards")
def verb():
    import ray
    try:
        ray.get(ray.remote(lambda: 1).remote())
    except Exception as error:
        print(type(error).__name__, ray.is_initialized())

main(["afterwards"])
"""


def test_a_call_of_ray_outside_a_session_starts_no_cluster() -> None:
    """Threads may call Ray while a session ends. Ray would then start a cluster of its own, which nobody guards."""
    found = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=1500)
    assert found.stdout.strip().splitlines()[-1:] == ["RaySystemError False"], found.stdout + found.stderr
