"""`ray job submit` to a running cluster: the job runs inside it, and its log comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_head import RayHead

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys
from pathlib import Path
import ray
from mlmclm.cluster.ray_cluster import ray_session

with ray_session(Path(sys.argv[1])) as session:
    @ray.remote
    def where():
        return {name: os.environ.get(name) for name in ("MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "FROM_THE_JOB")}
    print("told", json.dumps({"local": session.local, **ray.get(where.remote())}))
"""


def submit(
    head: RayHead, name: str, *entrypoint: str, folder: Path, timeout: float = 1500
) -> subprocess.CompletedProcess[str]:
    """Submits a job by the command line and waits for its end, with its log in `stdout`."""
    ray = str(Path(sys.executable).with_name("ray"))
    runtime_environment = '{"env_vars": {"FROM_THE_JOB": "yes", "MALLOC_ARENA_MAX": "2"}}'
    return subprocess.run(
        [
            *(ray, "job", "submit", "--address", head.dashboard, "--submission-id", name),
            *("--runtime-env-json", runtime_environment, "--", *entrypoint),
        ],
        env={**os.environ, **head.environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_a_submitted_driver_joins_the_cluster_it_was_submitted_to(ray_head: RayHead, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(SCRIPT)
    done = submit(ray_head, "hello", sys.executable, str(script), str(tmp_path / "store"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = '"local": false, "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1", "FROM_THE_JOB": "yes"'
    assert expected in done.stdout, "the log streams, and what the job sets goes before what we set"
    assert "'hello' succeeded" in done.stdout


def test_a_client_without_the_token_is_refused(ray_head: RayHead, tmp_path: Path) -> None:
    stranger = RayHead(ray_head.dashboard, ray_head.gcs, {"RAY_AUTH_TOKEN": "0" * 64}, ray_head.folder)
    refused = submit(stranger, "intruder", "true", folder=tmp_path)
    assert refused.returncode != 0
    assert "succeeded" not in refused.stdout
