"""Within `deterministic` an operation that isn't is an error that names it, and nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from mlmclm.backends.determinism import CUBLAS, deterministic
from mlmclm.cluster.worker_environment import worker_environment
from mlmclm.errors import UserError


def settings() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


def put() -> None:
    """Write one of two values to a place, whichever comes last."""
    torch.zeros(1).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_it_holds_within_the_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    with deterministic(True, "recipe"):
        assert settings() == (True, True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "the user's own choice stays"
    assert settings() == before == (False, False, True)
    with deterministic(False, "recipe"):
        put()
        assert settings() == before


def test_an_operation_without_a_deterministic_form_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with (
        pytest.raises(UserError, match=r"recipe\.deterministic: put_ has no deterministic form"),
        deterministic(True, "recipe"),
    ):
        put()
    assert not settings()[0]
    with pytest.raises(RuntimeError, match="something else"), deterministic(True, "recipe"):
        raise RuntimeError("something else")


def test_the_variable_of_cublas_is_there_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert CUBLAS.items() <= worker_environment().items()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert worker_environment()["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    seen = "import sys; from mlmclm.backends.determinism import CUBLAS; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", "what starts workers doesn't import torch for it"
