"""Fixtures of the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_api

from mlmclm.cli.main import main
from small_hub import Hub, served


@pytest.fixture(autouse=True)
def no_word_of_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suppress the message about Ray's start, which on a busy machine would come between the lines that tests check."""
    monkeypatch.setattr("mlmclm.progress.SECONDS_OF_SILENCE", 600.0)


@pytest.fixture
def study(finished_study: Any) -> Path:
    """The study file of `finished_study`."""
    return finished_study.study


@pytest.fixture
def run_apart(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process, where torch is loaded already: its exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        captured = capfd.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return call


@pytest.fixture
def run(run_apart: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str]]:
    """Run a command line in this process: its exit code and all that it printed."""

    def call(*words: str | Path) -> tuple[int, str]:
        code, output, errors = run_apart(*words)
        return code, output + errors

    return call


@pytest.fixture
def at_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set the hub's address; there is no token, and nothing is cached.

    The libraries have read the environment long before.
    """
    import datasets

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in doesn't speak it
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    for library in (constants, datasets.config):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", False)

    def at(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(hf_api.api, "endpoint", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)

    return at


@pytest.fixture
def hub(at_address: Callable[[str], None]) -> Iterator[Hub]:
    """A stand-in for the Hub, at its address."""
    with served() as server:
        at_address(server.address)
        yield server
