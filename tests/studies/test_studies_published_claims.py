"""docs/published-claims.md says what its commands print of the published study's results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT.parent / "shared" / "reference" / "encodeval_results.csv"
PAGE = (ROOT / "docs" / "published-claims.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```bash\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not RESULTS.is_file(), reason="the published results are not beside the checkout")
@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_the_page_s_commands_print_what_it_shows(number: int, tmp_path: Path) -> None:
    command, output = SHOWN[number]
    (tmp_path / RESULTS.name).write_bytes(RESULTS.read_bytes())
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in output.splitlines() if line not in done.stdout.splitlines()] == []


def test_the_page_shows_what_every_command_prints() -> None:
    assert len(SHOWN) == PAGE.count("```bash") == 4
