"""Two studies on one store: what their stages share is trained once, by whoever comes first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlmclm.corpora.blocks import Blocks, Shard
from mlmclm.corpora.shelf import Shelf
from mlmclm.launches import run_stage as launch
from mlmclm.launches.run_stage import run_stage, stage_leases
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import Plan, Stage, make_plan
from mlmclm.pretraining import states
from mlmclm.pretraining.job import StageJob
from mlmclm.storage.checksums import write_checksums
from mlmclm.storage.files import whole_folder
from mlmclm.storage.leases import Leases

RECIPE = Recipe(warmup_steps=2, decay_steps=4)
PRINT = "of this recipe and corpus"
BLOCKS = Blocks(Shelf("nowhere"), [Shard("train-00000.bin", 1, "")], 32, "<u2")
CORPUS = SimpleNamespace(key="", train=BLOCKS, validation=BLOCKS, tokenizer="")
GIVEN: dict[str, Any] = {"corpus": CORPUS, "recipe": RECIPE, "fingerprint": PRINT, "device": "cpu"}


def plan(*names: str) -> Plan:
    return make_plan([parse_name(name) for name in names], RECIPE)


class Training:
    """Stands in for a stage's training: notes each step, and deposits the states on its way."""

    def __init__(self) -> None:
        self.steps: Counter[tuple[str, int]] = Counter()
        self.running: Counter[Path] = Counter()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, job: StageJob, folder: Path, observer: Any) -> None:
        assert not self.running[folder], "two in one run's folder"
        self.running[folder] += 1
        done = job.stage.start.step
        for end, key in job.deposits.items():
            for step in range(done + 1, end + 1):
                self.steps[str(job.stage.objective), step] += 1
            done = end
            with whole_folder(states.state_folder(job.store, key)) as made:
                write_checksums(made)
            self.begun.set()
            assert self.go_on.wait(300)
        self.running[folder] -= 1


def together(store: Path, training: Training, stages: Sequence[Stage], said: pytest.CaptureFixture[str]) -> str:
    """Runs each stage as a study of its own would, the first one ahead; what was said meanwhile."""
    threads = [threading.Thread(target=lambda stage=stage: run_stage(stage, store=store, **GIVEN)) for stage in stages]
    threads[0].start()
    assert training.begun.wait(300)
    for thread in threads[1:]:
        thread.start()
    lines = ""
    while lines.count("waiting for process") < len(threads) - 1:
        lines += said.readouterr().err
        time.sleep(0.01)
    training.go_on.set()
    for thread in threads:
        thread.join(300)
    return lines


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    made = Training()
    monkeypatch.setattr(launch, "_fit", made)
    return made


def test_a_stage_that_two_studies_share_is_trained_once_and_the_second_says_that_it_waits(
    tmp_path: Path, training: Training, capfd: pytest.CaptureFixture[str]
) -> None:
    alone, among = plan("1m-clm-80").stages[0], plan("1m-clm-80", "1m-clm-40-mlm40-60").stages[0]
    assert (alone.end, len(alone.states)) == (among.end, len(among.states) - 1)
    lines = together(tmp_path, training, [among, alone, among], capfd)
    assert lines.count(f"{alone.title}: waiting for process") == 2
    assert training.steps == Counter({("clm", step): 1 for step in range(1, 81)})
    assert list((tmp_path / "claims").iterdir()) == []


def test_two_stages_that_part_train_their_trunk_once_and_go_on_side_by_side(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of these plans' first stages, one goes to 80 and the other to 60; both leave the state at 40 behind for the second model.
    far, near = (plan(f"1m-clm-{steps}", "1m-clm-40-mlm40-60").stages[0] for steps in (80, 60))
    assert far.end != near.end
    shared = far.states[0]
    assert shared == near.states[0]
    one = threading.Thread(target=lambda: run_stage(far, store=tmp_path, **GIVEN))
    one.start()
    assert training.begun.wait(300)  # the state at 40 is there, and the first study goes on to 80
    assert states.exists(tmp_path, shared.key(PRINT))
    other = threading.Thread(target=lambda: run_stage(near, store=tmp_path, **GIVEN))
    other.start()
    while not training.running[tmp_path / "runs" / near.end.key(PRINT)]:
        assert other.is_alive() or training.steps["clm", 60] == 2
        time.sleep(0.01)
    training.go_on.set()
    one.join(300)
    other.join(300)
    assert [training.steps["clm", step] for step in (1, 40, 41, 60, 61, 80)] == [1, 1, 2, 2, 1, 1]


def test_claims_cover_what_is_missing_and_the_folder_of_the_run(tmp_path: Path, training: Training) -> None:
    stage = plan("1m-clm-80", "1m-clm-40-mlm40-60").stages[0]
    leases = stage_leases(stage, tmp_path, PRINT)
    assert leases == (f"runs-{stage.end.key(PRINT)}", *(f"states-{state.key(PRINT)}" for state in stage.states))
    training.go_on.set()
    run_stage(stage, store=tmp_path, **GIVEN)
    assert stage_leases(stage, tmp_path, PRINT) == ()
    with Leases(tmp_path).attempt(leases):
        run_stage(stage, store=tmp_path, **GIVEN)  # a finished stage waits for nobody


def test_steps_between_two_states_that_are_there_are_not_trained_again(tmp_path: Path, training: Training) -> None:
    """A study gains models that branch off in the middle of what is trained."""
    training.go_on.set()
    names = ["1m-clm-90", "1m-clm-40-mlm40-60"]
    run_stage(plan(*names).stages[0], store=tmp_path, **GIVEN)  # to 80, then 90, with a state at 40
    stage = plan(*names, "1m-clm-30-mlm40-60", "1m-clm-60-mlm40-90").stages[0]
    there = {state.step for state in stage.states if states.exists(tmp_path, state.key(PRINT))}
    left = stage.left(lambda state: state.step in there)
    run_stage(stage, store=tmp_path, **GIVEN)
    steps = Counter(dict.fromkeys(range(1, stage.end.step + 1), 1))
    for part in left:
        steps.update(range(part.start.step + 1, part.end.step + 1))
    assert {part.title: part.steps for part in left} == {"1m clm 0-30": 30, "1m clm 40-60": 20}
    assert training.steps == Counter({("clm", step): number for step, number in steps.items()})
    assert all(states.exists(tmp_path, state.key(PRINT)) for state in stage.states)
