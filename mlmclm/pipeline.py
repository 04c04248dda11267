"""The way of the data from a study file to its report; what the verbs of the command line call.

    prepare -> pretrain -> export -> sweep -> report

Each step looks at the store first and does only what is missing there, so a study that was killed goes on where it stopped, and
a finished one costs seconds. Nothing heavy (torch, Ray) is imported before something is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.corpora.prepare import PreparedCorpus, prepare_corpus
from mlmclm.errors import UserError, unknown
from mlmclm.files import read_json, write_json
from mlmclm.models.sizes import SIZES, parameters, training_flops
from mlmclm.pretraining import states
from mlmclm.pretraining.launch import missing_states, run_stage
from mlmclm.progress import Bar, say
from mlmclm.studies.names import ModelName
from mlmclm.studies.plans import Plan, Stage, State, fingerprint, history, make_plan
from mlmclm.study_file import StudyFile

if TYPE_CHECKING:
    from mlmclm.sweeps.cells import SweepModel


@dataclass(frozen=True)
class Place:
    """Where a study works: the store it keeps everything in, and the folder that stands in for the hub."""

    store: Path
    data_root: Path | None = None

    def study_folder(self, study: StudyFile) -> Path:
        """The study's own folder: report, tables, links to models."""
        return self.store / "studies" / study.name


@dataclass(frozen=True)
class Prepared:
    """A study with its corpus on disk and its plan made."""

    study: StudyFile
    place: Place
    corpus: PreparedCorpus
    vocabulary: int
    plan: Plan
    fingerprint: str

    def target(self, name: ModelName) -> State:
        """The state that a model of the study is."""
        return self.plan.targets[self.plan.models.index(name)]

    def model_folder(self, name: ModelName) -> Path:
        """Where a model's Hugging Face folder lies, or will."""
        return states.state_folder(self.place.store, self.target(name).key(self.fingerprint)) / "model"

    def unfinished(self) -> list[Stage]:
        """Stages of which something is missing, in the order in which they can run."""
        return [stage for stage in self.plan.stages if missing_states(stage, self.place.store, self.fingerprint)[1]]


def prepare(study: StudyFile, place: Place) -> Prepared:
    """Reads, tokenises and packs the corpus where that isn't done yet, and makes the plan.

    Raises:
        UserError: anything that is wrong with the corpus, the tokenizer or a model's name.
    """
    plan = make_plan(study.parsed, study.recipe)  # before any work: a wrong name costs nothing
    with _bars() as progress:
        corpus = prepare_corpus(
            study.corpus,
            study.tokenizer,
            block_length=study.recipe.block_length,
            store=place.store,
            data_root=place.data_root,
            progress=progress,
        )
    vocabulary = corpus.vocabulary
    if len(corpus.train) < study.recipe.batch:
        raise UserError(
            f"corpus {study.corpus.source!r} has {len(corpus.train):,} blocks of {study.recipe.block_length} tokens, fewer than one batch "
            f"(recipe.batch {study.recipe.batch}); use more text, a smaller batch or a shorter block_length."
        )
    return Prepared(study, place, corpus, vocabulary, plan, fingerprint(study.recipe, corpus.key, vocabulary))


def pretrain(prepared: Prepared, on_records: Callable[[Stage, list[dict[str, Any]]], None] | None = None) -> int:
    """Trains the missing stages one after the other, in the current Ray session; returns how many there were."""
    unfinished = prepared.unfinished()
    recipe = prepared.study.recipe
    tokens_a_step = recipe.batch * recipe.block_length
    for number, stage in enumerate(unfinished, 1):
        start = missing_states(stage, prepared.place.store, prepared.fingerprint)[0].step
        title = f"pretraining {number}/{len(unfinished)}: {stage.title}"
        with Bar(title, stage.end.step * tokens_a_step, unit="tokens") as bar:
            bar.start_at(start * tokens_a_step)

            def follow(records: list[dict[str, Any]], stage: Stage = stage, bar: Bar = bar) -> None:
                trained = [record for record in records if "loss" in record]
                if trained:
                    last = trained[-1]
                    note = f"loss {last['loss']:.3f}, {last['tokens_per_second']:,.0f} tokens/s"
                    bar.update(last["step"] * tokens_a_step, note=note)
                if on_records is not None:
                    on_records(stage, records)

            run_stage(
                stage,
                store=prepared.place.store,
                corpus=prepared.corpus.folder,
                recipe=recipe,
                fingerprint=prepared.fingerprint,
                observer=follow,
            )
    return len(unfinished)


def export_models(prepared: Prepared) -> list[SweepModel]:
    """A Hugging Face folder for every model of the study, linked from the study's folder; returns what a sweep takes.

    Raises:
        UserError: a model isn't trained yet.
    """
    from mlmclm.models.folder import weights_hash
    from mlmclm.sweeps.cells import SweepModel

    models = []
    for name in prepared.plan.models:
        folder = prepared.model_folder(name)
        if not (folder / "config.json").is_file():
            _export(prepared, name, folder)
        link = prepared.place.study_folder(prepared.study) / "models" / str(name)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or link.resolve() != folder.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(folder.resolve(), target_is_directory=True)
        models.append(SweepModel(str(name), folder, _remembered(folder, "weights", weights_hash)))
    return models


def _remembered(folder: Path, what: str, compute: Callable[[Path], str]) -> str:
    """A hash of an immutable folder of the store, computed once and kept beside it."""
    path = folder.parent / f"{folder.name}.{what}.json"
    if not path.is_file():
        write_json(path, {what: compute(folder)})
    return str(read_json(path)[what])


def _export(prepared: Prepared, name: ModelName, folder: Path) -> None:
    from mlmclm.models.build import build, load_tokenizer, model_config
    from mlmclm.models.export import export_folder
    from mlmclm.reports.model_card import model_card

    recipe, state = prepared.study.recipe, prepared.target(name)
    key = state.key(prepared.fingerprint)
    tokenizer = load_tokenizer(prepared.corpus.tokenizer)
    config = model_config(name.size, tokenizer, recipe.block_length)
    if state.legs:
        if not states.exists(prepared.place.store, key):
            raise UserError(f"model {str(name)!r} is not trained yet: run `mlmclm pretrain` on this study first.")
        weights = states.read_weights(states.state_folder(prepared.place.store, key))
    else:
        weights = {key: tensor.contiguous() for key, tensor in build(config, recipe.seed).state_dict().items()}
    objective = name.last_objective
    export_folder(
        folder,
        weights,
        config,
        tokenizer,
        card=model_card(card_facts(prepared, name)),
        decoder=objective is not None and objective.causal,
    )


def card_facts(prepared: Prepared, name: ModelName) -> dict[str, Any]:
    """What a model's card says; nothing of it depends on when or where it was trained."""
    state, recipe, corpus = prepared.target(name), prepared.study.recipe, prepared.corpus
    objective = name.last_objective
    trained = _curve(prepared, state)
    validation = [record["validation_loss"] for record in trained if "validation_loss" in record]
    return {
        "name": str(name),
        "size": name.size,
        "parameters": parameters(SIZES[name.size], prepared.vocabulary),
        "stages": list(stage_texts(name, recipe.decay_steps)),
        "objective": str(objective) if objective is not None else None,
        "causal": objective is not None and objective.causal,
        "steps": state.step,
        "tokens": state.step * recipe.batch * recipe.block_length,
        "flops": flops(prepared, state),
        "recipe": recipe.identity(),
        "corpus": {
            "source": prepared.study.corpus.source,
            "documents": corpus.documents,
            "tokens": corpus.tokens,
            "vocabulary": prepared.vocabulary,
        },
        "validation_loss": validation[-1] if validation else None,
        "curve": [(record["step"], record["loss"]) for record in trained if "loss" in record],
    }


def stage_texts(name: ModelName, decay_steps: int) -> Iterator[str]:
    """One line a phase of a model's plan."""
    start = 0
    for index, phase in enumerate(name.phases):
        stop = min(phase.until, name.steps)
        if start >= stop:
            return
        decayed = (phase.decayed or index == len(name.phases) - 1) and decay_steps > 0 and stop > phase.until - decay_steps
        law = f", the last {stop - (phase.until - decay_steps)} with decaying rate" if decayed else ""
        words = "causal (CLM)" if phase.objective.causal else f"masked at {phase.objective.mask_percent} % (MLM)"
        yield f"steps {start} to {stop}: {words}{law}"
        start = stop


def flops(prepared: Prepared, state: State) -> int:
    """Model FLOPs of a state's whole history (`models.sizes.training_flops`)."""
    recipe = prepared.study.recipe
    total = 0
    for leg in state.legs:
        tokens = (leg.stop - leg.start) * recipe.batch * recipe.block_length
        share = (recipe.block_length - 1) / recipe.block_length if leg.objective.causal else leg.objective.mask_percent / 100
        total += training_flops(
            SIZES[state.size],
            tokens=tokens,
            labelled=round(tokens * share),
            length=recipe.block_length,
            vocabulary=prepared.vocabulary,
            causal=leg.objective.causal,
        )
    return total


def _curve(prepared: Prepared, state: State) -> list[dict[str, Any]]:
    return states.curve(prepared.place.store, state.key(prepared.fingerprint)) if state.legs else []


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Turns (what, done, total) calls into one bar a `what`."""
    open_bars: dict[str, Bar] = {}

    def show(what: str, done: int, total: int | None) -> None:
        if what not in open_bars:
            for bar in open_bars.values():
                bar.__exit__(None, None, None)
            open_bars.clear()
            open_bars[what] = Bar(what, total).__enter__()
        open_bars[what].update(done, total)

    try:
        yield show
    finally:
        for bar in open_bars.values():
            bar.__exit__(None, None, None)
