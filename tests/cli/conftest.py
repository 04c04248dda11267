"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlmclm.cli.main import main


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command line in this process: its exit code and what it printed."""

    def call(*words: str | Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        captured = capfd.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out + captured.err

    return call
