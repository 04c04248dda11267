"""The training loop tells callbacks of what it does; each built-in one does one thing, and is checked alone."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as distributed

import mlmclm
from mlmclm.backends.choice import backend_of
from mlmclm.backends.reference import Reference
from mlmclm.cluster.live_metrics import DEFINITIONS
from mlmclm.corpora.chunks import Rows
from mlmclm.corpora.mixed_blocks import rows_of_length
from mlmclm.errors import UserError
from mlmclm.launches.ray_worker import RayWorker
from mlmclm.models.sizes import SIZES
from mlmclm.plans.stages import Stage
from mlmclm.pretraining import states, step_meter
from mlmclm.pretraining.callbacks.callback import Callback, KeyedStage, RunningStage, callbacks_of
from mlmclm.pretraining.callbacks.gauges import Gauges
from mlmclm.pretraining.callbacks.metrics_log import MetricsLog
from mlmclm.pretraining.callbacks.revisions import Revisions
from mlmclm.pretraining.callbacks.stop_rule import StopRule
from mlmclm.pretraining.checkpoints import TrainingState, read_tensors
from mlmclm.pretraining.collator import Collator
from mlmclm.pretraining.engine import Evaluation
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.step_meter import StepMeter
from mlmclm.pretraining.step_metrics import StepMetrics
from mlmclm.pretraining.worker import training_loop
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.work import utilisation
from small_study import write_study

LAST = 25


class FakeEngine:
    """One worker's engine without a model: its losses are given."""

    world, micro, accumulation, separator = 1, 8, 1, None
    device, backend = torch.device("cpu"), backend_of("cpu")

    def __init__(self, rank: int = 0, diverges_at: int = 10**9, unlabelled: int = 0) -> None:
        self.rank, self.diverges_at, self.unlabelled = rank, diverges_at, unlabelled
        self.rates: list[float] = []

    def step(self, batches: Sequence[Any], objective: Any, *, rate: float) -> tuple[Any, Any, int, float]:
        self.rates.append(rate)
        if len(self.rates) == self.unlabelled:
            return torch.tensor(0.0), torch.tensor(0), 8 * 32, 0.0
        loss = 10.0 if len(self.rates) < self.diverges_at else float("nan")
        return torch.tensor(loss), torch.tensor(5), 8 * 32, 1.0

    def evaluate(self, batches: Iterator[Any], *, causal: bool) -> Evaluation:
        return Evaluation(3.0, 0.25)

    def state(self, step: int, *, moments: bool) -> TrainingState | None:
        assert not moments, "a revision has none"
        return TrainingState(step, {"weight": torch.full((2,), float(step))}, {}, {}) if self.rank == 0 else None


class Outside(Callback):
    """A callback as somebody else would write it."""

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        self.seen: list[Any] = []
        self.metrics: list[StepMetrics] = []
        self.calls = 0

    def on_start(self) -> None:
        self.seen.append("start")

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        self.metrics += metrics
        self.calls += 1

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        self.seen.append(("validation", step, loss))

    def on_step_end(self, step: int) -> None:
        self.seen.append(step)

    def on_end(self) -> None:
        self.seen.append("end")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    file = tmp_path_factory.mktemp("group") / "rendezvous"
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> StageJob:
    """A stage of 25 steps of CLM, with a checkpoint each 10 and a validation each 20."""
    folder = tmp_path_factory.mktemp("callbacks")
    recipe = {
        "block_length": 32, "batch": 8, "peak_learning_rate": 3e-3, "warmup_steps": 4, "decay_steps": 6,
        "checkpoint_every": 10, "evaluate_every": 20, "evaluation_blocks": 8, "workers": 1,
    }  # fmt: skip
    path = write_study(folder, models=[f"1m-clm-{LAST}"], baseline=None, recipe=recipe)
    made = prepare_study(load_study(path), Place(folder / "store", folder / "data"))
    (stage,) = made.plan.stages
    return StageJob(
        stage=stage, shape=SIZES["1m"], store=made.place.store, run_folder=folder,
        corpus=made.corpus.key, train=made.corpus.train, validation=made.corpus.validation,
        tokenizer=made.corpus.tokenizer, whole_recipe=made.study.recipe, fingerprint=made.fingerprint, device="cpu",
    )  # fmt: skip


def running(template: StageJob, folder: Path, engine: Any, start: int = 0) -> RunningStage:
    return RunningStage(replace(template, run_folder=folder), engine, RayWorker(), start)


def row(step: int, loss: float | None = 2.0, norm: float = 1.0) -> StepMetrics:
    return StepMetrics(step, loss, 1e-3, norm, 5, 8 * 32, 0.1, 1000.0, 0.5, 0.25, 2**20, 0.01)


def lines(stage: RunningStage) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stage.job.metrics_path.read_text().splitlines()]


def test_a_callback_from_outside_sees_each_step_with_its_metrics_and_each_validation(
    group: None, template: StageJob, tmp_path: Path
) -> None:
    stage = running(template, tmp_path, FakeEngine())
    outside = Outside(stage)
    training_loop(stage, StepMeter(stage.job, stage.engine, 400), [outside])
    checked = [("validation", step, 3.0) for step in (20, LAST)]
    expected = ["start", *range(1, 20), checked[0], *range(20, LAST), checked[1], LAST, "end"]
    assert outside.seen == expected
    assert [each.step for each in outside.metrics] == list(range(1, LAST + 1))
    assert {(each.loss, each.labelled, each.gradient_norm) for each in outside.metrics} == {(2.0, 5, 1.0)}
    assert [each.learning_rate for each in outside.metrics] == stage.engine.rates
    assert stage.engine.rates[0] < stage.engine.rates[3] == 3e-3 > stage.engine.rates[-1]


def test_a_callback_that_weights_may_depend_on_sees_the_same_however_training_is_divided(
    registers: None, group: None, template: StageJob, tmp_path: Path
) -> None:
    mlmclm.register("callback", "outside", Outside)
    recipe = template.whole_recipe.model_copy(update={"callbacks": ("outside",)})
    start, end = template.stage.start, template.stage.end
    seen: list[Any] = []
    for stages in ([(start, end)], [(start, end.at(7), end.at(13)), (end.at(13), end.at(21), end)]):
        events, metrics = list[Any](), list[StepMetrics]()
        for first, *deposited in stages:
            job, engine = replace(template, whole_recipe=recipe, stage=Stage(first, tuple(deposited))), FakeEngine()
            stage = running(job, tmp_path, engine, start=first.step)
            outside = Outside(KeyedStage(stage, each_step=Outside.needs_each_step()))
            training_loop(stage, StepMeter(stage.job, engine, 400), [outside, MetricsLog(stage)])
            events += [each for each in outside.seen if each not in ("start", "end")]
            metrics += outside.metrics
            assert outside.calls == deposited[-1].step - first.step, "one for each step"
        assert all(np.isnan([each.tokens_per_second, each.memory, each.data_wait]).all() for each in metrics)
        seen.append((events, [each[:6] for each in metrics]))
    assert seen[0] == seen[1]
    assert seen[0][0] == [*range(1, 21), ("validation", 20, 3.0), *range(21, LAST + 1)]


def test_a_callback_that_weights_may_depend_on_is_told_no_fact_that_keys_leave_out(
    template: StageJob, tmp_path: Path
) -> None:
    stage = running(template, tmp_path, SimpleNamespace(rank=0))
    seen = KeyedStage(stage, each_step=False)
    assert seen.engine is stage.engine and [seen.decay_end(step) for step in (19, 20, 25)] == [None, 25, 25]
    for fact in ("job", "start", "launcher", "callbacks"):
        with pytest.raises(UserError, match=rf"a callback asks for stage\.{fact}, which no key.*observes = True"):
            getattr(seen, fact)


def test_callbacks_of_this_package_and_from_outside_run_where_a_recipe_names_them_or_always(
    registers: None, template: StageJob, tmp_path: Path
) -> None:
    def kind(**said: bool) -> type[Callback]:
        return type("Watch", (Callback,), said)

    mlmclm.register("callback", "named", kind())
    mlmclm.register("callback", "watches", kind(always=True, observes=True))
    with pytest.raises(UserError, match=r"'changes'.*sets always = True, so it must set observes = True"):
        mlmclm.register("callback", "changes", kind(always=True))
    stage = running(template, tmp_path, SimpleNamespace(rank=0))
    assert list(callbacks_of(stage)) == ["Gauges", "MetricsLog", "Revisions", "StateWriter", "StopRule", "watches"]
    stage.job = replace(template, whole_recipe=template.whole_recipe.model_copy(update={"callbacks": ("named",)}))
    assert next(iter(callbacks_of(stage))) == "named" and callbacks_of(stage)["watches"].stage is stage


@pytest.mark.parametrize("rows", ["joined", "chunks"])
def test_batches_that_a_thread_prepares_for_a_device_of_its_own_are_the_same_in_the_same_order(
    group: None, template: StageJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Rows
) -> None:
    recipe = template.whole_recipe.model_copy(update={"rows": rows})
    corpus = rows_of_length(template.train, recipe.block_length, rows, template.tokenizer, None)
    makers: list[str] = []
    label = Collator.__call__

    def noted(self: Collator, *given: Any, **named: Any) -> Any:
        if named["step"] < LAST:  # not the validation's
            makers.append(threading.current_thread().name)
        return label(self, *given, **named)

    monkeypatch.setattr(Collator, "__call__", noted)
    batches: dict[bool, list[Any]] = {}
    for apart in (False, True):
        backend = Reference()
        backend.in_host_memory = not apart
        monkeypatch.setattr(FakeEngine, "backend", backend)
        monkeypatch.setattr(FakeEngine, "separator", 1 if rows == "chunks" else None)
        engine, seen = FakeEngine(), batches.setdefault(apart, [])
        step = engine.step

        def take(given: Sequence[Any], *more: Any, step: Any = step, seen: list[Any] = seen, **named: Any) -> Any:
            seen.append(given)
            return step(given, *more, **named)

        engine.step = take  # type: ignore[method-assign]
        makers.clear()
        stage = running(replace(template, whole_recipe=recipe, train=corpus), tmp_path, engine, start=3)
        training_loop(stage, StepMeter(stage.job, engine, 400), [])
        assert len(makers) == LAST - 3, "each step's batch is made once"
        assert all(name.startswith("mlmclm-read-ahead") == apart for name in makers)
    assert len(batches[True]) == LAST - 3
    for found, expected in zip(batches[True], batches[False], strict=True):
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


class Titled(Reference):
    """A device of this name."""

    def __init__(self, title: str) -> None:
        self._title = title

    def title(self) -> str:
        return self._title


@pytest.mark.parametrize(
    ("title", "precision", "peak"),
    [
        ("NVIDIA L4", "bf16-autocast", 121e12),
        ("NVIDIA L4", "fp32", None),
        ("A processor", "bf16-autocast", None),
    ],
)
def test_utilisation_is_given_by_the_measured_peak_and_by_the_published_one_where_it_is_known(
    group: None,
    template: StageJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    title: str,
    precision: str,
    peak: float | None,
) -> None:
    monkeypatch.setattr(FakeEngine, "backend", Titled(title))
    monkeypatch.setattr(step_meter, "matrix_peak", lambda device, *, bf16: 5e9)
    recipe = template.whole_recipe.model_copy(update={"precision": precision})
    stage = running(replace(template, whole_recipe=recipe), tmp_path, FakeEngine())
    outside, log = Outside(stage), MetricsLog(stage)
    training_loop(stage, StepMeter(stage.job, stage.engine, 400), [outside, log])
    (first, *_), (line, *_) = outside.metrics, lines(stage)
    assert line["published_utilisation"] == first.published_utilisation
    assert first.utilisation > 0
    if peak is None:
        assert first.published_utilisation is None
        assert utilisation(line).endswith("of the measured peak, no published one is known")
    else:
        assert first.published_utilisation == pytest.approx(first.utilisation * 5e9 / peak)
        assert re.fullmatch(r"\d+% of the measured peak, \d+% of the published one", utilisation(line))


def test_tokens_a_second_count_every_step_of_a_look_though_validation_comes_between(
    group: None, template: StageJob, tmp_path: Path
) -> None:
    class Slow(FakeEngine):
        def step(self, *given: Any, **named: Any) -> tuple[Any, Any, int, float]:
            time.sleep(0.005)
            return super().step(*given, **named)

    recipe = template.whole_recipe.model_copy(update={"evaluate_every": 4})
    stage = running(replace(template, whole_recipe=recipe), tmp_path, Slow())
    outside = Outside(stage)
    training_loop(stage, StepMeter(stage.job, stage.engine, 400), [outside])
    assert [each[1] for each in outside.seen if isinstance(each, tuple)] == [4, 8, 12, 16, 20, 24, LAST]
    looks = {rate: [each for each in outside.metrics if each.tokens_per_second == rate]
             for rate in {each.tokens_per_second for each in outside.metrics}}  # fmt: skip
    assert len(looks) < 7, "a look is at more steps than those between two validations"
    for rate, steps in looks.items():
        seconds = sum(each.step_seconds for each in steps)
        assert 1.001 * sum(each.tokens for each in steps) / rate > seconds > 0.005 * len(steps)


def test_a_stage_that_diverges_ends_at_the_next_look_with_the_lines_of_its_finite_steps(
    group: None, template: StageJob, tmp_path: Path
) -> None:
    stage = running(template, tmp_path, FakeEngine(diverges_at=13))
    outside = Outside(stage)
    training_loop(stage, StepMeter(stage.job, stage.engine, 400), [StopRule(stage), outside, MetricsLog(stage)])
    assert outside.seen == ["start", *range(1, 20), "end"]
    assert [line["step"] for line in lines(stage)] == list(range(1, 13))
    stopped = json.loads(stage.job.stop_path.read_text())
    assert stopped == {"step": 13, "what": "loss", "learning_rate": template.learning_rate(13)}


def test_the_loss_of_a_step_without_a_labelled_token_is_absent_and_stops_nothing(
    group: None, template: StageJob, tmp_path: Path
) -> None:
    class Asking(Outside):
        asks = ("loss",)

        def on_step_end(self, step: int) -> None:
            seen[step] = self.metric("loss")

    seen: dict[int, float] = {}
    stage = running(template, tmp_path, FakeEngine(unlabelled=3))
    training_loop(stage, StepMeter(stage.job, stage.engine, 400), [StopRule(stage), Asking(stage), MetricsLog(stage)])
    assert [line["loss"] for line in lines(stage) if "loss" in line] == [2.0, 2.0, None, *[2.0] * (LAST - 3)]
    assert seen == pytest.approx({step: 2.0 if step != 3 else float("nan") for step in range(1, LAST + 1)}, nan_ok=True)
    assert not stage.job.stop_path.exists()


def test_rank_0_has_every_callback_and_others_have_those_that_workers_share(template: StageJob, tmp_path: Path) -> None:
    names = [[*callbacks_of(running(template, tmp_path, SimpleNamespace(rank=rank)))] for rank in (0, 1)]
    assert names == [
        ["Gauges", "MetricsLog", "Revisions", "StateWriter", "StopRule"],
        ["Revisions", "StateWriter", "StopRule"],
    ]


def test_the_log_keeps_the_lines_up_to_the_start_and_writes_a_line_a_step(template: StageJob, tmp_path: Path) -> None:
    stage = running(template, tmp_path, FakeEngine(), start=2)
    stage.job.metrics_path.write_text("".join(f"{json.dumps({'step': step})}\n" for step in (1, 2, 3)))
    log = MetricsLog(stage)
    log.on_start()
    log.on_metrics([row(3), row(4, norm=-1.0), row(5)])
    log.on_validation(4, 0.0, 0.5)
    log.on_validation(5, float("inf"), 0.5)
    written = lines(stage)
    assert [line["step"] for line in written] == [1, 2, 3, 4]
    assert list(written[2]) == [
        "step", "loss", "learning_rate", "gradient_norm", "labelled", "tokens", "step_seconds", "tokens_per_second",
        "utilisation", "published_utilisation", "memory", "data_wait", "time",
    ]  # fmt: skip
    assert list(written[3]) == ["step", "validation_loss", "validation_perplexity", "validation_accuracy", "time"]
    assert written[3]["validation_perplexity"] == 1.0


@pytest.mark.parametrize("policy", [{"revisions_every": 5}, {"revisions_every_tokens": 5 * 8 * 32}])
def test_revisions_are_kept_once_and_what_a_killed_run_owed_is_kept_at_the_start(
    template: StageJob, tmp_path: Path, policy: dict[str, int]
) -> None:
    recipe = template.recipe.model_copy(update=policy)
    job = replace(template, whole_recipe=recipe, store=tmp_path, run_folder=tmp_path)

    def trained(start: int, stop: int) -> None:
        callback = Revisions(RunningStage(job, FakeEngine(), RayWorker(), start))
        callback.on_start()
        for step in range(start + 1, stop + 1):
            callback.on_step_end(step)

    def kept() -> dict[int, int]:
        paths = [path for path in tmp_path.glob("revisions/*/step.json") if not path.parent.name.endswith(".damaged")]
        return {json.loads(path.read_text())["step"]: path.stat().st_mtime_ns for path in paths}

    trained(0, 12)
    before = kept()
    assert sorted(before) == [0, 5, 10]
    lost = states.StoredRevision(tmp_path, job.key_at(10)).folder
    (lost / "state.safetensors").write_bytes(b"short")
    trained(10, LAST)
    assert sorted(kept()) == [0, 5, 10, 15, 20], "step 25 is the model's own state"
    assert all(kept()[step] == before[step] for step in (0, 5))
    weights = read_tensors(states.StoredRevision(tmp_path, job.key_at(15)).folder).weights
    assert torch.equal(weights["weight"], torch.full((2,), 15.0))
    assert states.damage(lost) is None


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(row(7, loss=float("inf")), "loss"), (row(7, norm=-1.0), "gradient"), (row(7, loss=None, norm=-1.0), "gradient")],
)
def test_the_stop_rule_stops_all_workers_and_rank_0_says_why(
    template: StageJob, tmp_path: Path, wrong: StepMetrics, what: str
) -> None:
    for rank in (1, 0):
        stage = running(template, tmp_path, FakeEngine(rank))
        rule = StopRule(stage)
        rule.on_metrics([row(6)])
        rule.on_validation(6, 2.0, 0.5)
        assert not stage.stopped
        rule.on_metrics([row(6), wrong, row(8)])
        assert stage.stopped
        assert stage.job.stop_path.is_file() == (rank == 0)
    assert json.loads(stage.job.stop_path.read_text())["what"] == what
    rule.on_validation(8, float("nan"), 0.5)
    assert json.loads(stage.job.stop_path.read_text())["what"] == "validation loss"


def test_the_gauges_set_every_metric_of_pretraining(
    template: StageJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: dict[str, float] = {}

    def show(name: str, value: float, **labels: str) -> None:
        assert labels == {"model": f"1m-clm-{LAST}", "objective": "clm"}
        exported[name] = value

    monkeypatch.setattr("mlmclm.cluster.live_metrics.show", show)
    gauges = Gauges(running(template, tmp_path, FakeEngine()))
    gauges.on_metrics([row(1), row(2, loss=1.5)])
    gauges.on_validation(2, 1.25, 0.5)
    assert exported.keys() == {name for name in DEFINITIONS if name.startswith("mlmclm_pretraining_")}
    assert exported["mlmclm_pretraining_loss"] == 1.5
    assert exported["mlmclm_pretraining_tokens_total"] == 2 * 8 * 32
