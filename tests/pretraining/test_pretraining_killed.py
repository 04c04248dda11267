"""A run killed again and again, at random steps and in every way, ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from mlmclm.pretraining.states import read_metrics
from small_study import run, start, write_study

KILLS = 22
STEPS = 1000
MODEL = f"1m-mlm40-{STEPS // 1000}k"
SECONDS = 1500


def write_long_study(folder: Path) -> Path:
    path = write_study(folder, models=[MODEL], baseline=None)
    study = yaml.safe_load(path.read_text())
    study["recipe"] |= {
        "checkpoint_every": 10, "evaluate_every": STEPS, "max_failures": 2 * KILLS, "warmup_steps": 20, "decay_steps": 200,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(study))
    return path


def workers(driver: subprocess.Popen[str]) -> list[int]:
    """Process ids of the run's Ray Train workers."""
    found = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def reached(store: Path) -> int:
    """The last step that the running stage has noted; 0 before it does."""
    return max((row["step"] for path in store.glob("runs/*/metrics.jsonl") for row in read_metrics(path)), default=0)


def weights(store: Path) -> bytes:
    (folder,) = (path.parent for path in store.glob("states/*/state.json"))
    return (folder / "state.safetensors").read_bytes()


@pytest.fixture
def driver_ended() -> Iterator[list[subprocess.Popen[str]]]:
    drivers: list[subprocess.Popen[str]] = []
    yield drivers
    for driver in drivers:
        driver.kill()
        driver.communicate()


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_a_run_killed_at_random_steps_twenty_times_ends_with_the_same_bits(
    tmp_path: Path, driver_ended: list[subprocess.Popen[str]]
) -> None:
    study = write_long_study(tmp_path / "study")
    command = ("pretrain", study, "--data", study.parent / "data", "--store")
    code, _, errors = run(*command, tmp_path / "undisturbed", home=tmp_path, timeout=SECONDS)
    assert code == 0, errors

    store, chance = tmp_path / "killed", random.Random(7)
    kinds = ["driver"] * (KILLS // 6) + ["all workers"] * (KILLS // 4)
    kinds += ["worker"] * (KILLS - len(kinds))
    chance.shuffle(kinds)
    counts: Counter[str] = Counter()
    steps: list[int] = []
    driver = start(*command, store, home=tmp_path)
    driver_ended.append(driver)
    target, deadline = chance.randint(1, 30), time.monotonic() + SECONDS
    while driver.poll() is None:
        assert time.monotonic() < deadline, f"{sum(counts.values())} kills and {reached(store)} steps in {SECONDS} s"
        if kinds and reached(store) >= target and (alive := workers(driver)):
            time.sleep(chance.uniform(0, 0.3))  # anywhere within a step, a write, a report
            kind = kinds.pop()
            counts[kind] += 1
            for pid in {"driver": [driver.pid], "all workers": alive, "worker": [chance.choice(alive)]}[kind]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            steps.append(reached(store))
            # Beyond what the file says now, so that it is a restarted worker that gets there.
            target = steps[-1] + chance.randint(1, 30)
            if kind == "driver":
                driver.communicate()
                driver = start(*command, store, home=tmp_path)
                driver_ended.append(driver)
        time.sleep(0.05)
    _, errors = driver.communicate()
    assert driver.returncode == 0, errors
    print(f"killed {dict(counts)} at steps {steps}")
    assert sum(counts.values()) >= 20, f"only {dict(counts)} before the run had ended"
    assert weights(store) == weights(tmp_path / "undisturbed")
    (key,) = (path.parent for path in store.glob("states/*/state.json"))
    trained = [row["step"] for row in read_metrics(key / "metrics.jsonl") if "loss" in row]
    assert trained == list(range(1, STEPS + 1)), "each step's loss once"
    assert not list(store.glob("runs/*")), "a finished stage leaves no working files"
