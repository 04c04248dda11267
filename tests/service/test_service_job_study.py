"""A whole study submitted with `ray job submit` to a running cluster, as the README says."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from test_service_job_submission import submit

from ray_head import RayHead
from small_study import write_study


@pytest.mark.slow
def test_a_study_runs_as_a_ray_job_streams_its_log_and_is_named_in_the_dashboard(
    ray_head: RayHead, tmp_path: Path
) -> None:
    study = write_study(tmp_path, models=["1m-untrained", "1m-clm-30"])
    store = tmp_path / "store"
    command = ("study", str(study), "--store", str(store), "--data", str(tmp_path / "data"))
    done = submit(ray_head, "small-study", sys.executable, "-m", "mlmclm", *command, folder=tmp_path, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("pretraining 1/1: 1m clm 0-30", "fine-tuning", "report:"):
        assert line in done.stdout, "the log streams to whoever submitted the job"
    assert (store / "studies" / "small" / "report.html").is_file()
    assert len(list((store / "cells").glob("*/*.json"))) == 16
    jobs = _get(ray_head, "/api/jobs/")
    assert "small-study" in {job["submission_id"] for job in jobs}
    runs = _get(ray_head, "/api/train/v2/runs/v1")["train_runs"]
    assert [run["name"] for run in runs] == ["1m-clm-0-30-1"]


def _get(head: RayHead, path: str) -> Any:
    """The dashboard's answer to a request with the token."""
    token = head.environment["RAY_AUTH_TOKEN"]
    request = urllib.request.Request(head.dashboard + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
