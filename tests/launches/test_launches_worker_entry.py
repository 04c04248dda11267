"""Imports of a worker, before it trains."""

from __future__ import annotations

import subprocess
import sys


def test_a_worker_starts_deepspeed_without_mlflow_which_it_can_import_later() -> None:
    code = (
        "import sys\nfrom mlmclm.launches.worker_entry import import_deepspeed\nimport_deepspeed()\n"
        "assert 'deepspeed' in sys.modules and 'mlflow' not in sys.modules\nimport mlflow"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
