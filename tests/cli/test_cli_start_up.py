"""Help answers at once: no verb's page waits for a library that only its work needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "numpy",
    "pyarrow",
    "pandas",
    "torch",
    "transformers",
    "datasets",
    "ray",
    "mlflow",
    "scipy",
)
SCRIPT = f"""
import sys
from mlmclm.cli.main import app, main
verbs = [[]] + [[command.name or command.callback.__name__] for command in app.registered_commands]
verbs += [[group.name] for group in app.registered_groups] + [["store", "why"], ["tracking", "ui"], ["data", "order"], ["tasks", "check"]]
verbs += [["sweep", verb] for verb in ("run", "status", "cells", "retry")]
for words in verbs:
    try:
        main([*words, "--help"])
    except SystemExit as ended:
        assert not ended.code, words
    assert words or "pydantic" not in sys.modules
print("LOADED", *sorted(set({HEAVY!r}) & sys.modules.keys()))
print("VERBS", len(verbs))
"""


def test_the_help_of_no_verb_loads_what_its_work_needs() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    loaded, verbs = done.stdout.splitlines()[-2:]
    assert loaded.split()[1:] == []
    assert int(verbs.split()[1]) >= 14


def test_a_study_that_is_finished_is_looked_at_without_torch_or_ray() -> None:
    modules = (
        "mlmclm.studies.api, mlmclm.studies.work, mlmclm.studies.plan, mlmclm.cli.output, mlmclm.reports.write_report"
    )
    modules += ", mlmclm.sweeps.run_sweep"
    code = f"import sys, {modules}; print(*sorted({{'torch', 'transformers', 'ray', 'mlflow'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(("typed", "expected"), [
    ("mlmclm st", "study"), ("mlmclm study --dr", "--dry-run"), ("mlmclm bundle v", "verify"),
    ("mlmclm sweep --dr", "--dry-run"), ("mlmclm sweep st", "status"),
])  # fmt: skip
def test_a_shell_completes_verbs_and_options(typed: str, expected: str) -> None:
    environment = {**os.environ, "_MLMCLM_COMPLETE": "complete_bash", "COMP_WORDS": typed,
                   "COMP_CWORD": str(typed.count(" "))}  # fmt: skip
    program = Path(sys.executable).with_name("mlmclm")
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=True)
    assert expected in done.stdout.split()
