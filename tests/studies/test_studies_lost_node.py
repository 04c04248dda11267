"""A Ray node of our own that dies is started again while models are trained, and else said."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from mlmclm.cluster.ray_cluster import LostNode, explain_ray_failures, ray_session
from mlmclm.errors import EnvironmentFault, UserError
from small_models import save_pronoun_model, save_small_model, write_sentiment
from small_study import write_study


def kill_raylet(pid: int) -> bool:
    """Kill the node that a process has started; return whether there is one."""
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if Path((child.cmdline() or [""])[0]).name == "raylet":
                child.kill()
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the workers start", "while they train"])
def test_a_node_that_dies_in_pretraining_is_started_again_and_training_goes_on(tmp_path: Path, moment: str) -> None:
    study = write_study(tmp_path / "study", models=["1m-clm-300"], baseline=None)
    words = ("pretrain", str(study), "--store", str(tmp_path / "store"), "--data", str(study.parent / "data"), "--json")
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, "-m", "mlmclm", *words],
        env={**os.environ, "COLUMNS": "200"}, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while ("Ray dashboard" if moment == "before the workers start" else "loss ") not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert kill_raylet(process.pid)
        output, _ = process.communicate(timeout=1500)
    finally:
        process.kill()
    said = log.read_text()
    assert process.returncode == 0, said
    assert "Ray's node on this machine has died" in said and "Ray starts again, 1 of at most 3 times." in said
    assert '"1m-clm-300": {' in output


@pytest.mark.slow
def test_a_node_that_dies_in_a_sweep_is_said_with_what_resumes(tmp_path: Path) -> None:
    """Without a look at it, Ray ends the process at the next task without a word."""
    write_sentiment(tmp_path / "data", train=24, test=8)
    protocol = {"batch_size": 8, "max_steps": 100_000, "max_length": 16, "stride": 8}
    space = {"tasks": ["sst2"], "learning_rates": [1e-3], "seeds": [0, 1], "protocol": protocol}
    models = {"one": str(save_small_model(tmp_path / "one"))}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump({"name": "long", "models": models, "space": space}))
    words = ("sweep", tmp_path / "long.yaml", "--store", tmp_path / "store", "--data", tmp_path / "data")
    log = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-m", "mlmclm", *map(str, words)], stderr=log.open("w"))
    try:
        deadline = time.monotonic() + 300
        while " running, " not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert kill_raylet(process.pid)
        assert process.wait(200) == 1
    finally:
        process.kill()
    assert (
        "Ray's node on this machine has died. What is finished is kept, and the same command resumes" in log.read_text()
    )


EVALUATION = """
import sys
from pathlib import Path
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.evaluation.evaluations import Subject
from mlmclm.evaluation.language_model import scoring_of
from mlmclm.evaluation.zero_shot_config import ZeroShot
from mlmclm.sweeps.zero_shot import evaluate_missing
place = Path(sys.argv[1])
asked = ZeroShot(winogender=str(place / "wino"))
missing = [(Subject.of("one", *scoring_of(place / "one")), asked.read(None)[0])]
with ray_session(place / "ray", num_cpus=1):
    evaluate_missing(missing, asked, store=place / "store", data_root=None, device="cpu", cpus=1)
"""


@pytest.mark.slow
def test_a_node_that_dies_in_zero_shot_evaluation_is_said(tmp_path: Path) -> None:
    save_pronoun_model(tmp_path / "one")
    (tmp_path / "wino").mkdir()
    (tmp_path / "wino" / "templates.tsv").write_text(
        "occupation(0)\tother-participant(1)\tanswer\tsentence\nbaker\tguest\t0\tThe $OCCUPATION said $NOM_PRONOUN left.\n"
    )
    (tmp_path / "wino" / "occupations-stats.tsv").write_text("occupation\tbls_pct_female\nbaker\t60.5\n")
    words = [sys.executable, "-c", EVALUATION, str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and any("0/1 evaluations" in line for line in process.stderr)
        assert kill_raylet(process.pid)
        _, errors = process.communicate(timeout=200)
    assert "LostNode: Ray's node on this machine has died" in errors


USES_THE_STORE = """
import sys
from pathlib import Path
import ray
from mlmclm.cluster.ray_cluster import ray_session
with ray_session(Path(sys.argv[1]), num_cpus=1):
    print("ready", flush=True)
    sys.stdin.read()
    ray.put("anything")
"""


def test_a_driver_that_ray_ends_at_once_has_said_why(tmp_path: Path) -> None:
    words = [sys.executable, "-c", USES_THE_STORE, str(tmp_path)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert kill_raylet(process.pid)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert errors.endswith(
        "mlmclm: Ray's node on this machine has died. What is finished is kept, and the same command resumes from it.\n"
    )


def test_an_error_after_the_node_s_death_names_it_and_other_errors_stay(tmp_path: Path) -> None:
    with (
        pytest.raises(LostNode, match=r"Ray's node on this machine has died.*the same command resumes"),
        ray_session(tmp_path, num_cpus=1),
    ):
        with pytest.raises(ZeroDivisionError), explain_ray_failures():
            raise ZeroDivisionError
        assert kill_raylet(os.getpid())
        while psutil.Process().children() and any(
            "raylet" in child.name() and child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children()
        ):
            time.sleep(0.05)
        with pytest.raises(UserError), explain_ray_failures():
            raise UserError("the user's own")
        raise EnvironmentFault("ActorDiedError: The actor never ran")
