"""The Ray Tune trainable: fine-tunes cells and files their results itself, in a sweep and in a user's own Tuner.

The driver imports this module too, so transformers' models are imported only in methods that workers call.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from ray import tune
from ray._raylet import setproctitle  # type: ignore[attr-defined]  # not in its stubs

from mlmclm.backends.choice import backend_of, visible
from mlmclm.backends.device_kinds import BACKEND, Device
from mlmclm.cluster.placement import device_of, no_gpu
from mlmclm.errors import EnvironmentFault, MissingBucket, MlmclmError, StorageFault, UserError
from mlmclm.finetuning.cell import CELL_THREADS, Cell, cell_key, shapes_of
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.models.warm_up import compile_kernels
from mlmclm.results.metrics import value_of
from mlmclm.seeds import seed_value
from mlmclm.storage.addresses import address_of
from mlmclm.storage.retrying import NoAnswer
from mlmclm.sweeps.cells import cell_name, named_result
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import KeptWeights
from mlmclm.sweeps.trial import (
    COMPUTED,
    ENVIRONMENT_FAULT,
    REUSED,
    STORAGE_FAULT,
    SWEEP,
    TAKEN,
    USER_ERROR,
    WAITING,
    SweepTrial,
    Training,
    trial_source,
)

SECONDS_BETWEEN_SIGNS = 5.0
"""Seconds between two reports in which a trial says that it waits for storage."""
RAY_PROCESS = "ray::"
"""Beginning of process titles, by which Ray's commands recognise workers."""

Answer = TypeVar("Answer")


class Finetune(tune.Trainable):
    """Fine-tunes a cell; its config comes from `mlmclm.tune.param_space`, or from a sweep.

    Reports have `score` (the task's main metric on validation, by which to choose), all scores as `validation/NAME`,
    and the training `step`. The last one has scores as `test/NAME` too, the cell's `key` and `status`, and says whether
    it was `computed` or found in the store. Of cells that share a training, the first has these entries, the others have them
    below their task's name: `mnli_mm/score`. A diverged cell's score is NaN. Names are such that MLflow, TensorBoard and W&B
    take them: `ndcg_at_10` for `ndcg@10`.

    A trial that a scheduler stops early leaves no result. One that is paused, or restored, is trained again up to where
    it was. A cell has one learning rate from beginning to end, so a scheduler that changes it (PBT) is an error.

    Models, data and compiled kernels stay in the process from trial to trial with Tune's `reuse_actors`.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the space's `cpus_per_cell` and `gpus_per_cell`; `tune.with_resources` sets others."""
        return tune.PlacementGroupFactory([dict(trial_source(config).bundle())])

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare the trial without beginning it, so that its errors are raised by the first step."""
        self.load()
        self._cache: dict[Any, Any] = {}
        self._weights = ""
        self._prepared: set[tuple[Path, str]] = set()
        """Models, by folder and precision, whose kernels are compiled."""
        self._reported, self._reports = 0, self._trial(0)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin another trial with the models and data that this process holds."""
        self.cleanup()
        self.config = new_config
        self._reported, self._reports = 0, self._trial(0)
        return True

    def load(self) -> None:
        """Import what computes cells, which takes seconds, before any cell's time is counted."""
        import mlmclm.finetuning.run  # noqa: F401

    def step(self) -> dict[str, Any]:
        """Train until the next report; until then the process has the trial's name, as `ps` and Ray's dashboard show it."""
        if self.trial_name is not None:
            setproctitle(f"{RAY_PROCESS}{self.trial_name}")  # Ray sets its own title when this method returns
        report = next(self._reports)
        self._reported += 1
        return report

    def cleanup(self) -> None:
        """Give up a cell that isn't finished, and the lease on it."""
        self._reports.close()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Save the number of reports so far; training up to there again gives the same weights."""
        return {"config": _plain(self.config), "reports": self._reported}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Let the next step train anew from the start, past the reports that the checkpoint counts.

        Raises:
            UserError: the checkpoint is another config's.
        """
        if checkpoint is None or checkpoint["config"] != _plain(self.config):
            raise UserError(
                "a cell is trained with one config from beginning to end; use a scheduler that changes none."
            )
        self.cleanup()
        self._reported = checkpoint["reports"]
        self._reports = self._trial(self._reported)

    def _trial(self, skipped: int) -> Generator[dict[str, Any], None, None]:
        """Yield the trial's reports after the first `skipped` ones, and the last report in any case."""
        trial: SweepTrial = trial_source(self.config).trial(self.config)
        self._store, self._data_root = trial.store, trial.data_root
        self._results_store = ResultsStore(trial.store)
        resources = self.trial_resources
        self._device: Device = device_of(trial.resources or (resources.required_resources if resources else {}))
        # The number of threads sets the order of sums, so another number would change the scores.
        torch.set_num_threads(CELL_THREADS)
        # The cache holds one model only.
        if trial.first.weights != self._weights:
            self._cache.clear()
            self._weights = trial.first.weights
        yield from (self._by_itself(trial, skipped) if trial.by_itself else self._of_a_sweep(trial))

    def _of_a_sweep(self, trial: SweepTrial) -> Iterator[dict[str, Any]]:
        """Yield a report on each training of a sweep's trial."""
        for number, training in enumerate(trial.trainings, 1):
            print(f"{training.name}: begun", flush=True)
            report = yield from self._outcome(trial, training, () if number > 1 else trial.failures)
            gone = report["outcome"] in (ENVIRONMENT_FAULT, STORAGE_FAULT)
            print(f"{training.name}: {report['outcome']}", flush=True)
            yield {**report, "training_iteration": number, "done": gone or number == len(trial.trainings)}

    def _outcome(
        self, trial: SweepTrial, training: Training, failures: Sequence[Mapping[str, str]]
    ) -> Generator[dict[str, Any], None, dict[str, Any]]:
        """Compute and file a training; return the report. An error that would recur is an outcome, any other is raised.

        Yields:
            Reports that it waits for storage.
        """
        try:
            self._get_ready(training, trial.seen)
            began = time.perf_counter()  # work done once for all cells of a model is not this cell's time
            outcomes, results = yield from self._run(training, failures)
            seconds = time.perf_counter() - began
            precision = training.first.protocol.precision
            backend = backend_of(self._device).described(precision) if COMPUTED in outcomes.values() else ""
            # A list in the order of the keys, because Tune flattens mappings in results.
            report: dict[str, Any] = {"outcome": COMPUTED, "outcomes": list(outcomes.values()), "backend": backend}
            report |= _on_results(training, results, [key for key in outcomes if outcomes[key] == COMPUTED])
            report |= {"results": [results.get(key) for key in outcomes], "seconds": seconds}
        except (StorageFault, MissingBucket) as error:
            report = {"outcome": STORAGE_FAULT, "message": str(error), "exit_code": error.exit_code}
        except MlmclmError as error:
            kind = ENVIRONMENT_FAULT if isinstance(error, EnvironmentFault) else USER_ERROR
            report = {"outcome": kind, "message": str(error)}
        except Exception:
            raise
        except BaseException as error:  # a panic of tokenizers' Rust code is no Exception
            raise RuntimeError(repr(error)) from error
        return report

    def _get_ready(self, training: Training, seen: Path | None) -> None:
        # A node with a folder of the same name on its own disk would compute cells that nobody finds.
        if seen is not None and address_of(self._store) is None and not seen.is_dir():
            raise EnvironmentFault(
                f"{platform.node()} doesn't see this sweep in {self._store}: the store must be on a file system that all "
                "nodes of the cluster share. Give such a folder or an address, such as s3://bucket/prefix, with --store."
            )
        # A GPU that torch cannot see would fail every cell here, so this stops the sweep instead of causing retries.
        if not visible(self._device):
            raise EnvironmentFault(no_gpu(platform.node()))
        # Compile kernels before any cell of a model is timed; the driver has done so only for its own machine.
        kind = training.first.model_folder, training.first.protocol.precision
        if kind not in self._prepared:
            compile_kernels(shapes_of([training.first]), print, self._device)
        self._prepared.add(kind)

    def _run(
        self, training: Training, failures: Sequence[Mapping[str, str]] = ()
    ) -> Generator[dict[str, Any], None, tuple[dict[str, str], dict[str, dict[str, Any]]]]:
        """Compute and file the cells of a training; return the outcomes of all, and the results, each by key.

        Args:
            failures: earlier failures in this sweep, which are noted in the results.

        Yields:
            Reports that it waits for storage.
        """
        results_store = self._results_store
        outcomes, results = dict.fromkeys(training.cells, REUSED), dict[str, dict[str, Any]]()

        def lease(leases: ExitStack, key: str) -> str | None:
            return leases.enter_context(results_store.leases.attempt([results_store.lease(key)]))

        def filed_result(key: str) -> dict[str, Any] | None:
            return results_store.find(key) or (results_store.find(key) if results_store.file_unfiled([key]) else None)

        with ExitStack() as leases:
            missing = []
            for key, cell in training.cells.items():
                if cell_key(cell) != key:
                    raise UserError(
                        f"{cell_name(cell)}: its key is {cell_key(cell)[:12]} on {platform.node()}, and {key[:12]} where the sweep was "
                        f"planned: your own code, a package's version or {BACKEND} differs between the two. Install the same packages on "
                        "all nodes, and start the sweep again."
                    )
                if (yield from self._answered(partial(lease, leases, key))) is not None:
                    outcomes[key] = TAKEN
                elif (filed := (yield from self._answered(partial(filed_result, key)))) is not None:
                    results[key] = filed
                else:
                    missing.append(cell)
            # File each result before the next evaluation, so that none is lost if a later evaluation fails.
            for result in self.compute(missing) if missing else ():
                if failures:
                    result["cost"]["retried_after"] = list(failures)
                key = result["key"]
                yield from self._file(result)
                outcomes[key], results[key] = COMPUTED, (yield from self._answered(partial(results_store.filed, key)))
        return outcomes, results

    def _file(self, result: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """File a result; one that cannot be filed at once is kept in the store's folder `unfiled`, and filed from there."""
        first = True

        def file() -> None:
            nonlocal first
            again, first = not first, False
            if not (again and self._results_store.file_unfiled([result["key"]])):
                self._results_store.write(result)

        yield from self._answered(file)

    def _answered(self, ask: Callable[[], Answer]) -> Generator[dict[str, Any], None, Answer]:
        """Return the result of a call to storage; during an outage, yield a report from time to time, until the retry timeout ends."""
        available = self._results_store.availability
        policy, began, since = available.retry, time.monotonic(), datetime.now()
        while True:
            left = policy.seconds - (time.monotonic() - began)
            available.retry = replace(policy, seconds=min(left, SECONDS_BETWEEN_SIGNS))
            try:
                return ask()
            except NoAnswer:
                if left <= SECONDS_BETWEEN_SIGNS:
                    raise
            finally:
                available.retry = policy
            yield {"outcome": WAITING, "notice": f"waiting for storage since {since:%H:%M:%S}"}

    def compute(self, cells: Sequence[Cell], every: int | None = None) -> Iterable[dict[str, Any]]:
        """Compute the results of cells that share a training (see `run_training`), and file their examples.

        Args:
            every: training steps between reports, which then come before the results; None for none.
        """
        from mlmclm.finetuning.run import run_training

        return run_training(
            cells,
            store=self._store,
            data_root=self._data_root,
            cache=self._cache,
            device=self._device,
            on_examples=self._results_store.write_examples,
            report_every=every,
        )

    def _by_itself(self, trial: SweepTrial, skipped: int) -> Iterator[dict[str, Any]]:
        """Yield the reports of a user's own trial."""
        (training,) = trial.trainings
        results_store, every = self._results_store, trial.every or 1
        with ExitStack() as leases:
            # A sweep, or another trial, may be computing the same cells.
            for key, cell in training.cells.items():
                leases.enter_context(results_store.leased(key, cell_name(cell)))
            results_store.file_unfiled(training.keys)
            computed = [key for key in training.keys if results_store.find(key) is None]
            if computed:
                self._get_ready(training, None)
                if (source := trial.source) is not None:
                    self._ensure(KeptEncoder(self._store, cell_key(source)), source)
                for number, entry in enumerate(self.compute([training.cells[key] for key in computed], trial.every)):
                    if "key" in entry:
                        results_store.write(entry)
                    elif number >= skipped:
                        scores = {"score": entry["score"], "metric": _name(training.first.declared.metric)}
                        report = _place(training, entry["step"]) | scores | {"validation": _named(entry["validation"])}
                        yield {**report, "training_iteration": math.ceil(entry["step"] / every)}
        last = _on_results(training, {key: results_store.filed(key) for key in training.keys}, computed)
        # Computed from the step, so that a result found in the store is reported with the iteration of one that is computed now.
        yield {**last, "training_iteration": math.ceil(last["step"] / every), "done": True}

    def _ensure(self, kept: KeptEncoder, cell: Cell) -> None:
        """Train a cell again to keep its encoder, unless that is kept."""
        from mlmclm.finetuning.run import keep_encoder

        options: dict[str, Any] = {"data_root": self._data_root, "cache": self._cache, "device": self._device}
        kept.ensure(partial(keep_encoder, cell, store=self._store, **options), title=cell_name(cell))

    def __repr__(self) -> str:
        # Ray shows an actor by its first repr for ever. A sweep's actors have many trials, and their logs name these.
        return str(self.trial_name) if getattr(trial_source(self.config), "by_itself", True) else type(self).__name__


class KeepEncoders(Finetune):
    """Computes cells of a sweep again to keep their encoders, for other cells to start from."""

    def _run(
        self, training: Training, failures: Sequence[Mapping[str, str]] = ()
    ) -> Generator[dict[str, Any], None, tuple[dict[str, str], dict[str, dict[str, Any]]]]:
        yield from ()  # an outage is waited for without a report
        outcomes = {key: self._keep(key, cell) for key, cell in training.cells.items()}
        return outcomes, KeptWeights(self._store).find_all(key for key in outcomes if outcomes[key] != TAKEN)

    def _keep(self, key: str, cell: Cell) -> str:
        kept = KeptEncoder(self._store, key)
        if kept.leases.holder(kept.lease) is not None:
            return TAKEN
        if kept.find():
            return REUSED
        self._ensure(kept, cell)
        return COMPUTED


def _on_results(training: Training, results: Mapping[str, dict[str, Any]], computed: Collection[str]) -> dict[str, Any]:
    """Return the entries of a report on the results of a training, given by key; `computed` are the keys of new ones."""
    steps, by_task = list[int](), list[tuple[str, dict[str, Any]]]()
    for key, cell in training.cells.items():
        if key in results:
            result = named_result(results[key], cell)
            scores = result["scores"] or {}
            entries = {
                "score": value_of(scores["validation"], result["metric"]) if scores else math.nan,
                "metric": _name(result["metric"]),
                **{split: _named(scores.get(split, {})) for split in ("validation", "test")},
                "key": key,
                "status": result["status"],
                "computed": key in computed,
            }
            steps.append(result["diverged_step"] or result["steps"])
            by_task.append((cell.task, entries))
    return {**_place(training, steps[0]), **by_task[0][1], **dict(by_task[1:])} if by_task else {}


def _place(training: Training, step: int) -> dict[str, Any]:
    """Return the entries of a report that identify its trial, and its step."""
    cell, seed = training.first, seed_value(training.first.seed)
    return {"model": cell.model, "task": training.task, "learning_rate": cell.learning_rate, "seed": seed, "step": step}


def _named(scores: Mapping[str, float]) -> dict[str, float]:
    return {_name(metric): score for metric, score in scores.items()}


def _name(metric: str) -> str:
    """Return a metric's name in a form that every logger accepts; MLflow refuses @."""
    return metric.replace("@", "_at_")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's config without the sweep, which all trials share."""
    return {name: value for name, value in config.items() if name != SWEEP}
