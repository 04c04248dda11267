"""Fault tables that tests fill: of nodes, in pretraining or in a sweep, and of the ways in which a command ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.results import machine, write_section

TESTS = Path(__file__).parents[1] / "tests"


def row(case: ElementTree.Element) -> str:
    """Return the table's row of a test: its name as words, its outcome, and its seconds."""
    name, _, variant = (case.get("name") or "").removeprefix("test_").partition("[")
    outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "as it should be")
    words = name.replace("_", " ") + (f" ({variant.rstrip(']')})" if variant else "")
    return f"| {words} | {outcome} | {float(case.get('time') or 0):.0f} |"


def rows_of(*words: str) -> list[str]:
    """Run tests, given as pytest's words in the folder of tests, and return a row for each."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "results.xml"
        command = (sys.executable, "-m", "pytest", *words, "-q", "--tb=short", f"--junitxml={file}")
        subprocess.run(command, cwd=TESTS, check=False)  # the table says which failed
        return [row(case) for case in ElementTree.parse(file).iter("testcase")]


def measure() -> None:
    """Run the tests of nodes, which takes an hour or more, and write the section."""
    rows = rows_of("nodes/test_nodes.py")
    write_section("Faults of nodes", [
        f"`python -m benchmarks.faults --nodes` on {machine()}. Each node has network, processes and files of its own (`tests/nodes/test_nodes.py`);",
        "results, weights and losses are compared with those of one machine or of undisturbed nodes, bit by bit unless the test says otherwise.",
        "", "| what happens | outcome | s |", "|---|---|---|", *rows,
    ])  # fmt: skip


def measure_ends() -> None:
    """Run the tests of how commands end and of the environment's variables, some half an hour, and write the section."""
    files = ("cli/test_cli_shutdown.py", "cluster/test_cluster_variables.py", "studies/test_studies_lost_node.py")
    rows = rows_of("-m", "slow or not slow", *files)
    write_section("Ends of commands, and their environment", [
        f"`python -m benchmarks.faults --ends` on {machine()}: {', '.join(f'`tests/{file}`' for file in files)}.",
        "", "| what happens | outcome | s |", "|---|---|---|", *rows,
    ])  # fmt: skip
