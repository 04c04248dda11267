"""Our servers: what is waited for is said, and a failed start shows the server's own reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlmclm.errors import EnvironmentFault
from mlmclm.service import servers
from mlmclm.service.servers import server_process


def test_a_server_that_ends_or_stays_silent_is_a_fault_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, log = "http://127.0.0.1:9/health", tmp_path / "server.log"
    program = "import sys; print(*range(30), sep='\\n'); print('OSError: the port is in use'); sys.exit(3)"
    with pytest.raises(EnvironmentFault) as found, server_process([sys.executable, "-c", program], "It", url, log):
        raise AssertionError("started")
    said = str(found.value)
    assert "It doesn't start: it has ended with exit code 3. Its last output:\n16\n" in said
    assert said.endswith("29\nOSError: the port is in use")
    assert f"It is starting: waiting up to 300 s for an answer at {url}" in capsys.readouterr().err.replace("\n", "")

    monkeypatch.setattr(servers, "START_SECONDS", 1.0)
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        pytest.raises(EnvironmentFault, match=r"it doesn't answer at .* after 1 s\. It has printed nothing"),
        server_process(silent, "It", url, log),
    ):
        raise AssertionError("started")
