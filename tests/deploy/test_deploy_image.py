"""The image of `deploy/cpu.Dockerfile`, where Docker or Podman has one under the name that its first lines give it."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from small_study import write_study

IMAGE = "mlmclm"
Engine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    for program in filter(None, map(shutil.which, ("docker", "podman"))):
        if subprocess.run([program, "image", "inspect", IMAGE], capture_output=True).returncode == 0:
            return lambda *words: subprocess.run([program, *words], capture_output=True, text=True, timeout=1500)
    pytest.skip(f"needs Docker or Podman with the image: docker build -f deploy/cpu.Dockerfile -t {IMAGE} .")


@pytest.fixture
def volume(engine: Engine) -> Iterator[str]:
    name = f"mlmclm-test-{uuid.uuid4().hex}"
    assert engine("volume", "create", name).returncode == 0
    yield name
    engine("volume", "rm", "--force", name)


@pytest.mark.slow
def test_it_has_what_kuberay_and_the_compose_file_call_and_is_not_root(engine: Engine) -> None:
    code = "import os, psycopg2, s3fs; assert os.getuid() == 10001"
    command = f'command -v bash python ray mlmclm mlflow g++ && python -c "{code}" && touch store/file'
    done = engine("run", "--rm", "--entrypoint", "/bin/bash", IMAGE, "-c", command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_study_s_results_are_in_a_new_volume_and_the_next_container_computes_nothing(
    engine: Engine, volume: str, tmp_path: Path
) -> None:
    study = write_study(tmp_path, models=["1m-untrained", "1m-clm-30"], space="space.yaml")
    space = yaml.safe_load((tmp_path / "space.yaml").read_text()) | {"tasks": ["sst2"], "learning_rates": [1e-3]}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    for folder in [tmp_path, *tmp_path.rglob("*")]:
        folder.chmod(0o755)  # pytest's folders are for their owner alone
    mounts = ("-v", f"{volume}:/home/mlmclm/store", "-v", f"{tmp_path}:/study:ro")
    words = ("run", "--rm", "--shm-size", "1g", *mounts, IMAGE)
    outputs = []
    for _ in range(2):
        done = engine(*words, "study", f"/study/{study.name}", "--data", "/study/data")
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout + done.stderr)
    first, second = ({word for word in ("pretraining", "fine-tuning") if word in output} for output in outputs)
    assert (first, second) == ({"pretraining", "fine-tuning"}, set())
