"""Every file that a stage and a cell open is in the key of what they file, or is on a short list with reasons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opened_files import KINDS

import mlmclm

ELSEWHERE = {
    sys.prefix: "libraries and their data: the result says their versions",
    sys.base_prefix: "Python itself: the result says its version",
    str(Path(mlmclm.__file__).parent): "this package: `versions` has what counts of it, and is in the keys",
    str(Path(__file__).parents[1]): "the code of this test",
    os.environ["NUMBA_CACHE_DIR"]: "loops compiled for this processor, named by a hash of their source",
    "/proc": "what the kernel says of this process and machine",
    "/sys": "what the kernel says of the processors",
    "/dev": "devices: null, random numbers, shared memory",
    "/etc": "names of hosts and users, and of the operating system",
    "/usr": "the system's libraries, compilers, time zones and languages",
    "/lib": "the system's libraries",
}
"""Folders outside of the test's own from which files are read, and why that is in no key."""
MADE_AGAIN = {
    "store/prepared/": "damaged tokens are set aside and made again from the task's data, whose hash is in the key",
}
"""Beginnings of the names of files of the test's own folder whose change is no error, and why."""


@pytest.mark.parametrize("kinds", [[*KINDS][:2], [*KINDS][2:]], ids=["cells", "stages"])
def test_each_file_that_is_opened_is_in_the_key_or_on_a_list_with_reasons(kinds: list[str], tmp_path: Path) -> None:
    script = Path(__file__).with_name("opened_files.py")
    paths = os.pathsep.join([str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    run = subprocess.run(
        [sys.executable, script, tmp_path / "place", *kinds],
        capture_output=True,
        text=True,
        timeout=1500,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"elsewhere"')]
    assert len(lines) == len(kinds)
    for found in lines:
        check(found, tmp_path)


def check(found: dict[str, Any], tmp_path: Path) -> None:
    """Check what a run has opened, and what came of changing it."""
    own = (str(tmp_path / "home"), str(tmp_path / "tmp"))  # empty before
    known = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in (*ELSEWHERE, *own))
    assert [path for path in found["elsewhere"] if not f"{path}{os.sep}".startswith(known)] == []
    outcomes = found["outcomes"]
    # With another byte in it, a file is refused, or it is made again and the result is bit-equal.
    refused = {name for name, outcome in outcomes.items() if outcome.startswith("UserError")}
    made_again = {name for name, outcome in outcomes.items() if outcome == "the same"}
    assert {name: outcomes[name] for name in outcomes.keys() - refused - made_again} == {}
    assert [name for name in made_again if not name.startswith(tuple(MADE_AGAIN))] == []
    assert len(refused) >= 4, "the inputs were seen"
