"""A stage on real Ray Train: workers die and it goes on, from checkpoints and states that are whole."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from small_training import prepared

from mlmclm.errors import EnvironmentFault
from mlmclm.pretraining import states
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.work import train_missing_stages


def weights(made: PreparedStudy, index: int = 0) -> dict[str, Any]:
    state = made.plan.targets[index]
    return load_file(states.state_folder(made.place.store, state.key(made.fingerprint)) / "state.safetensors")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


@contextmanager
def one_worker_killed(store: Path, at: int) -> Iterator[None]:
    """Kills one worker of the stage that runs in the body, after a checkpoint at step `at` or later."""
    killed: list[int] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if any(step >= at for run in store.glob("runs/*") for step, _ in states.checkpoints(run)):
                for process in psutil.Process().children(recursive=True):
                    if "RayTrainWorker" in " ".join(process.cmdline()):
                        os.kill(process.pid, signal.SIGKILL)
                        killed.append(process.pid)
                        return
            time.sleep(0.02)

    killer = threading.Thread(target=kill_one)
    killer.start()
    yield
    killer.join()
    assert killed, "no worker was killed, so nothing was tested"


def interrupt(made: PreparedStudy, at: int) -> Path:
    """Pretrains until a worker is killed, and gives up then; returns the run's folder."""
    with one_worker_killed(made.place.store, at), pytest.raises(EnvironmentFault):
        train_missing_stages(made)
    (folder,) = made.place.store.glob("runs/*")
    return folder


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.unlink()  # other folders may hold a link to the same content
    path.write_bytes(content)


@pytest.fixture(scope="module")
def undisturbed(session: None, study_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedStudy:
    made = prepared(study_path, tmp_path_factory.mktemp("undisturbed"), "1m-mlm40-200")
    train_missing_stages(made)
    return made


def curve(made: PreparedStudy) -> dict[int, float]:
    rows = states.curve(made.place.store, made.plan.targets[0].key(made.fingerprint))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 201)), "each step's loss once"
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.slow
def test_a_stage_under_zero_3_whose_workers_build_no_model_begins_with_the_same_weights(
    undisturbed: PreparedStudy, study_path: Path, tmp_path: Path
) -> None:
    divided = prepared(study_path, tmp_path, "1m-mlm40-10", zero_stage=3)
    train_missing_stages(divided)
    first, other = (
        next(row for row in states.curve(made.place.store, made.plan.targets[0].key(made.fingerprint)) if "loss" in row)
        for made in (undisturbed, divided)
    )
    assert first["step"] == other["step"] == 1
    assert other["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert other["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)


@pytest.mark.slow
def test_checkpoints_that_are_not_whole_are_not_used_but_the_one_before_them(
    undisturbed: PreparedStudy, study_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disturbed = prepared(study_path, tmp_path, "1m-mlm40-200", max_failures=0, keep_checkpoints=3)
    run_folder = interrupt(disturbed, 20)
    left = states.checkpoints(run_folder)
    steps = [step for step, _ in left]
    assert len(steps) in (3, 4), "three are kept, and one that Ray Train hadn't yet heard of"
    assert steps == [steps[0] - 5 * place for place in range(len(steps))]
    file = left[0][1] / "state.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    flip_a_byte(left[1][1] / "state.safetensors")
    whole = [folder for _, folder in left if states.damage(folder) is None]
    assert whole == [folder for _, folder in left[2:]]
    train_missing_stages(disturbed)
    said = "".join(capsys.readouterr().err.split("\n"))
    assert f"{left[1][1]} is skipped: state.safetensors" in said
    assert f"{left[0][1]} is skipped" not in said, "one of the wrong size is deleted before anything starts"
    assert same(weights(undisturbed), weights(disturbed))


@pytest.mark.slow
def test_a_stage_goes_on_with_fewer_and_more_workers_and_another_zero_stage(
    undisturbed: PreparedStudy, study_path: Path, tmp_path: Path
) -> None:
    for workers, zero_stage, until in ((2, 1, 20), (1, 2, 60)):
        interrupt(prepared(study_path, tmp_path, "1m-mlm40-200", max_failures=0, workers=workers, zero_stage=zero_stage), until)  # fmt: skip
    last = prepared(study_path, tmp_path, "1m-mlm40-200", workers=2, zero_stage=3)
    train_missing_stages(last)
    assert curve(last) == pytest.approx(curve(undisturbed), abs=0.02)


@pytest.mark.slow
def test_a_state_that_is_damaged_is_trained_again_before_another_stage_starts_from_it(
    session: None, study_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk = prepared(study_path, tmp_path / "store", "1m-clm-30")
    train_missing_stages(trunk)
    for folder in (tmp_path / "store" / "states").glob("*"):
        flip_a_byte(folder / "state.safetensors")
    changed = prepared(study_path, tmp_path / "store", "1m-clm-dec30-mlm40-50")
    train_missing_stages(changed)
    assert "its checksum differs" in " ".join(capsys.readouterr().err.split())
    alone = prepared(study_path, tmp_path / "alone", "1m-clm-dec30-mlm40-50")
    train_missing_stages(alone)
    assert same(weights(alone), weights(changed))


@pytest.mark.slow
def test_a_state_that_cannot_be_written_ends_the_run_and_says_which(
    session: None, study_path: Path, tmp_path: Path
) -> None:
    made = prepared(study_path, tmp_path, "1m-clm-30", max_failures=0)
    (tmp_path / "states").write_text("a file where the folder should be")
    with pytest.raises(EnvironmentFault, match=f"{tmp_path / 'states'}.*cannot write"):
        train_missing_stages(made)
    (tmp_path / "states").unlink()
    train_missing_stages(made)
    assert not made.unfinished()
