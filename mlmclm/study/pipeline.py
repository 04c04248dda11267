"""The way of the data from a study file to its report; what the verbs of the command line call.

    prepare -> pretrain -> export -> sweep -> report

Each step looks at the store first and does only what is missing there, so a study that was killed goes on where it stopped, and
a finished one costs seconds. Nothing heavy (torch, Ray) is imported before something is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.corpora.config import TokenizerConfig
from mlmclm.corpora.prepare_corpus import find_corpus, prepare_corpus
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.corpora.tokenizer import check_special, special_ids
from mlmclm.errors import UserError, for_each
from mlmclm.plans.names import ModelName
from mlmclm.plans.plan import Plan, Stage, State, fingerprint, make_plan
from mlmclm.pretraining import states
from mlmclm.pretraining.initial import (
    Beginning,
    InitialModel,
    check_initial,
    find_initial,
    first_config,
    prepare_initial,
)
from mlmclm.pretraining.run_stage import missing_states, run_stage, set_aside_damaged, stage_claims
from mlmclm.pretraining.side_by_side import room, run_stages
from mlmclm.progress import Bar, say
from mlmclm.service.placement import check_workers, choose_device, worker_bundle
from mlmclm.storage.checksums import noted, set_aside, write_sealed
from mlmclm.storage.claims import Claims, make_once
from mlmclm.storage.files import first_there, places_of, read_json
from mlmclm.study.place import Place
from mlmclm.study.study_file import StudyFile

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.sweeps.cells import SweepModel
    from mlmclm.sweeps.run_sweep import SweepOutcome
    from mlmclm.sweeps.space import Space
    from mlmclm.sweeps.starts import Planned
    from mlmclm.tasks.prepared_task import PreparedTask


@dataclass(frozen=True)
class PreparedStudy:
    """A study with its corpus on disk and its plan made."""

    study: StudyFile
    place: Place
    corpus: PreparedCorpus
    plan: Plan
    fingerprint: str
    initial: Mapping[str, InitialModel] = field(default_factory=dict)
    """What sizes begin with, of those that don't begin with random weights."""

    def target(self, name: ModelName) -> State:
        """The state that a model of the study is."""
        return self.plan.targets[self.plan.models.index(name)]

    def model_folder(self, name: ModelName) -> Path:
        """Where a model's Hugging Face folder lies, or will."""
        return states.state_folder(self.place.store, self.target(name).key(self.fingerprint)) / "model"

    def curve(self, name: ModelName) -> list[dict[str, Any]]:
        """A trained model's metrics from its first step on, one record a step; empty for an untrained one."""
        state = self.target(name)
        return states.curve(self.place.store, state.key(self.fingerprint)) if state.legs else []

    def trained(self, stage: Stage) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """A finished stage's own metrics, one record a step, and the machine and software that it ended on (`system_facts`)."""
        key = stage.end.key(self.fingerprint)
        rows = states.curve(self.place.store, key)
        system = states.describe(states.state_folder(self.place.store, key)).get("system", {})
        return [row for row in rows if row["step"] > stage.start.step], system

    def unfinished(self) -> list[Stage]:
        """Stages of which something is missing, in the order in which they can run."""
        return [stage for stage in self.plan.stages if missing_states(stage, self.place.store, self.fingerprint)[1]]


def prepare(
    study: StudyFile, place: Place, *, session: Callable[[], AbstractContextManager[Any]] | None = None
) -> PreparedStudy:
    """Reads, tokenises and packs the corpus where that isn't done yet, and makes the plan.

    Args:
        session: a Ray session to tokenise in, for which `corpus.workers` then is the only judge; None where there is no
            cluster but one of this machine's own.

    Raises:
        UserError: anything that is wrong with the corpus, the tokenizer, a model's name or a model to continue from.
    """
    plan = make_plan(study.parsed, study.recipe)  # before any work: a wrong name costs nothing
    beginning = prepare_initial(**_beginning_of(study, place))
    with bars() as progress:
        corpus = prepare_corpus(
            study.corpus,
            beginning.tokenizer,
            block_length=study.recipe.block_length,
            store=place.store,
            data_root=place.data_root,
            beside=study.folder,
            progress=progress,
            session=session if session is not None or study.corpus.workers != "ray" else partial(_own_session, place),
        )
    check_special(corpus.tokenizer, masked=_masks(plan))
    needed = study.recipe.batch * study.recipe.block_length
    if corpus.tokens < needed:
        raise UserError(
            f"corpus {study.corpus.source!r} has {corpus.tokens:,} tokens, fewer than the {needed:,} of one step (recipe.batch {study.recipe.batch:,} x "
            f"recipe.block_length {study.recipe.block_length:,}); use more text, a smaller batch or a shorter block_length."
        )
    return _prepared(study, place, corpus, beginning.models)


def find_prepared(study: StudyFile, place: Place, *, damaged: bool = False) -> PreparedStudy | None:
    """Return what `prepare` would without any work, or None where there is some to do; raises what it raises.

    Args:
        damaged: also where the work is to make lost shards of the corpus again.
    """
    beginning, corpus = _find(study, place, damaged=damaged)
    return None if beginning is None or corpus is None else _prepared(study, place, corpus, beginning.models)


def check_models_to_continue(study: StudyFile, place: Place, plan: Plan) -> None:
    """Raises what `prepare` would raise of the models to continue from, without any work on them."""
    if study.initial:
        check_initial(**_beginning_of(study, place), masked=_masks(plan))


def _masks(plan: Plan) -> bool:
    return any(stage.objective.masks for stage in plan.stages)


def find_study_corpus(study: StudyFile, place: Place) -> PreparedCorpus | None:
    """A study's corpus where it is prepared, even if files of it are missing or short."""
    return _find(study, place, damaged=True)[1]


def _beginning_of(study: StudyFile, place: Place) -> dict[str, Any]:
    """What `prepare_initial` and `find_initial` are asked."""
    return {
        "initial": study.initial,
        "used": {name.size for name in study.parsed},
        "tokenizer": _tokenizer_of(study),
        "block_length": study.recipe.block_length,
        "store": place.store,
        "data_root": place.data_root,
        "beside": study.folder,
    }


def _tokenizer_of(study: StudyFile) -> TokenizerConfig | None:
    """The study's tokenizer, its path from here."""
    tokenizer = study.tokenizer
    if tokenizer is None or tokenizer.path is None:
        return tokenizer
    places = places_of(tokenizer.path, study.folder)
    found = first_there(places)
    if found is None:
        raise UserError(
            f"tokenizer.path: {tokenizer.path}: no such file or folder; looked for {' and '.join(map(str, places))}."
        )
    return tokenizer.model_copy(update={"path": str(found)})


def _find(study: StudyFile, place: Place, *, damaged: bool) -> tuple[Beginning | None, PreparedCorpus | None]:
    beginning = find_initial(**_beginning_of(study, place))
    if beginning is None:
        return None, None
    corpus = find_corpus(
        study.corpus,
        beginning.tokenizer,
        block_length=study.recipe.block_length,
        store=place.store,
        data_root=place.data_root,
        beside=study.folder,
        damaged=damaged,
    )
    return beginning, corpus


def _prepared(
    study: StudyFile, place: Place, corpus: PreparedCorpus, initial: Mapping[str, InitialModel]
) -> PreparedStudy:
    plan = make_plan(study.parsed, study.recipe, {size: model.key for size, model in initial.items()})
    key = fingerprint(
        study.recipe, corpus.key, corpus.vocabulary, padded_with_eos=_padded_with_eos(study, corpus, initial)
    )
    return PreparedStudy(study, place, corpus, plan, key, initial)


def _padded_with_eos(study: StudyFile, corpus: PreparedCorpus, initial: Mapping[str, InitialModel]) -> bool:
    """Whether the pad token of one of the study's models is EOS."""
    ids = special_ids(corpus.tokenizer)
    begun = [initial.get(size) for size in {name.size for name in study.parsed}]
    pads = [
        ids["pad"] if model is None else read_json(model.folder / "config.json").get("pad_token_id") for model in begun
    ]
    return ids["eos"] in pads


def _own_session(place: Place) -> AbstractContextManager[Any]:
    from mlmclm.service.ray_cluster import ray_session

    return ray_session(place.store)


def pretrain(prepared: PreparedStudy, on_records: Callable[[Stage, list[dict[str, Any]]], None] | None = None) -> int:
    """Trains the missing stages in the current Ray session, as many at once as it has room for or can get; returns how many
    there were.

    Raises:
        UserError: the cluster can never hold a stage's workers (`placement.check_workers`), or what `run_stage` raises.
    """
    from mlmclm.service.cluster import cluster_view, waits_said

    claims = Claims(prepared.place.store)
    set_aside_damaged(prepared.plan.stages, prepared.place.store, prepared.fingerprint)
    unfinished = prepared.unfinished()
    recipe = prepared.study.recipe
    tokens_a_step = recipe.batch * recipe.block_length
    if not unfinished:
        return 0
    view = cluster_view()
    device = choose_device(recipe.device, view())  # once for all stages, whatever nodes come and go
    check_workers(recipe.workers, recipe.device, device, view())

    def train(stage: Stage) -> None:
        title = f"pretraining {unfinished.index(stage) + 1}/{len(unfinished)}: {stage.title}"
        first, missing = missing_states(stage, prepared.place.store, prepared.fingerprint)
        if not missing:
            say(f"{title}: another process has trained it")
            return
        start = first.step
        with Bar(title, stage.end.step * tokens_a_step, unit="tokens") as bar:
            bar.start_at(start * tokens_a_step)

            def follow(records: list[dict[str, Any]]) -> None:
                trained = [record for record in records if "loss" in record]
                if trained:
                    last = trained[-1]
                    note = f"loss {last['loss']:.3f}, {last['tokens_per_second']:,.0f} tokens/s"
                    bar.update(last["step"] * tokens_a_step, note=note, rate=last["tokens_per_second"])
                if on_records is not None:
                    on_records(stage, records)

            run_stage(
                stage,
                store=prepared.place.store,
                corpus=prepared.corpus,
                recipe=recipe,
                fingerprint=prepared.fingerprint,
                device=device,
                initial=prepared.initial.get(stage.end.size),
                observer=follow,
            )

    def ready(stage: Stage) -> bool:
        start = missing_states(stage, prepared.place.store, prepared.fingerprint)[0]
        return not start.legs or states.exists(prepared.place.store, start.key(prepared.fingerprint))

    def held(stage: Stage) -> str | None:
        names = stage_claims(stage, prepared.place.store, prepared.fingerprint)
        return next((other for other in map(claims.holder, names) if other is not None), None)

    def at_once(running: int) -> int:
        return room(view(), worker_bundle(device), workers=recipe.workers, running=running)

    with waits_said("pretraining", view):
        run_stages(unfinished, run=train, ready=ready, at_once=at_once, held=held)
    return len(unfinished)


def export_models(prepared: PreparedStudy) -> list[SweepModel]:
    """A Hugging Face folder for every model of the study, linked from the study's folder; returns what a sweep takes.

    Raises:
        UserError: a model isn't trained yet.
    """
    models = []
    for name in prepared.plan.models:
        folder = prepared.model_folder(name)
        make_once(
            prepared.place.store,
            f"models-{folder.parent.name}",
            f"{name}'s folder",
            there=partial(_is_exported, folder),
            make=partial(_export_again, prepared, name, folder),
        )
        if not noted(folder):
            _mend(folder, prepared)
        link = prepared.place.study_folder(prepared.study) / "models" / str(name)
        target = Path(os.path.relpath(folder.resolve(), link.parent.resolve()))  # a store may be moved
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target, target_is_directory=True)
        models.append(exported_model(prepared, name))
    return models


def _is_exported(folder: Path) -> bool:
    from mlmclm.models.notes import damage_of_export

    return (folder / "config.json").is_file() and damage_of_export(folder) is None


def _export_again(prepared: PreparedStudy, name: ModelName, folder: Path) -> None:
    """Exports a model, in place of a folder that is damaged."""
    from mlmclm.models.notes import damage_of_export

    found = damage_of_export(folder)
    if found is not None:
        say(f"{folder} is not used: {found}. It is kept as {set_aside(folder).name} and exported again.")
    _export(prepared, name, folder)


def exported_model(prepared: PreparedStudy, name: ModelName) -> SweepModel:
    """A model that `export_models` has exported."""
    from mlmclm.sweeps.cells import SweepModel

    folder = prepared.model_folder(name)
    return SweepModel(str(name), folder, _remembered(folder))


def _mend(folder: Path, prepared: PreparedStudy) -> None:
    """Brings a folder that an earlier version exported up to date; the hashes of model and tokenizer stay."""
    from mlmclm.models.exported_tokenizer import mend_tokenizer
    from mlmclm.models.notes import CONTEXT, add_notes, read_notes

    if CONTEXT not in read_notes(folder):
        add_notes(folder, {CONTEXT: prepared.study.recipe.block_length})
    if mend_tokenizer(folder, prepared.corpus.tokenizer):
        say(f"{folder}: its tokenizer added tokens that the model was never trained with; it is exported again.")


def _remembered(folder: Path) -> str:
    """The hash of a model folder of the store, computed once and kept beside it."""
    from mlmclm.models.notes import read_remembered

    path = folder.with_name(f"{folder.name}.weights.json")
    known = read_remembered(path)
    if known is None:
        if path.is_file():
            say(f"{path} is not used: it is damaged. It is kept as {set_aside(path).name} and made again.")
        from mlmclm.models.folder import weights_hash

        write_sealed(path, {"weights": weights_hash(folder)})
    return known or _remembered(folder)


def restore_exports(prepared: PreparedStudy, names: Collection[str]) -> None:
    """Reads the folders of these models, from which cells are about to be computed, and exports again what is damaged.

    Raises:
        UserError: what is exported again is another model to its cells.
    """
    from mlmclm.models.folder import weights_hash
    from mlmclm.models.notes import note_written

    for name in prepared.plan.models:
        folder = prepared.model_folder(name)
        if str(name) not in names:
            continue
        try:
            found = weights_hash(folder)
        except UserError as error:
            say(f"{error} It is kept as {set_aside(folder).name} and exported again.")
            _export(prepared, name, folder)
            found = weights_hash(folder)
        if found != _remembered(folder):
            raise UserError(
                f"{folder}: it was damaged, and what this version exports in its place is another model to its cells. Put back a copy; or "
                f"delete {folder} and {folder.name}.weights.json beside it: the model's cells are then computed anew."
            )
        if not noted(folder):
            note_written(folder)  # of an earlier version; the hash that it noted is right


def _export(prepared: PreparedStudy, name: ModelName, folder: Path) -> None:
    from mlmclm.models.architectures import weights_of
    from mlmclm.models.build import build
    from mlmclm.models.export import export_folder
    from mlmclm.models.given import read_written
    from mlmclm.pretraining.checkpoints import read_weights
    from mlmclm.reports.model_card import model_card
    from mlmclm.study.facts import card_facts

    recipe, state = prepared.study.recipe, prepared.target(name)
    key, initial = state.key(prepared.fingerprint), prepared.initial.get(name.size)
    config = first_config(name.size, initial, prepared.corpus.tokenizer, recipe.block_length)
    if state.legs:
        if not states.exists(prepared.place.store, key):
            raise UserError(f"model {str(name)!r} is not trained yet: run `mlmclm pretrain` on this study first.")
        weights = read_weights(states.state_folder(prepared.place.store, key))
    elif initial is not None:
        initial.check()
        weights = dict(read_written(initial.folder)[1])
    else:
        weights = weights_of(build(config, recipe.seed))
    objective = name.last_objective
    export_folder(
        folder,
        weights,
        config,
        prepared.corpus.tokenizer,
        card=model_card(card_facts(prepared, name)),
        decoder=objective is not None and objective.causal,
        context=recipe.block_length,
    )


def study_space(study: StudyFile, task_dirs: Sequence[Path] = ()) -> Space:
    """The study's search space, with the study's own tasks in place of the space's where it names some.

    Raises:
        UserError: an unknown space or task, or a sequence longer than the models are trained for.
    """
    from mlmclm.sweeps.space import find_space
    from mlmclm.tasks.registry import get_task

    space = find_space(study.space, study.tasks, beside=study.folder).at_context(study.recipe.block_length)

    def check(task: str) -> None:
        protocol = space.protocol_for(task)
        get_task(task, task_dirs).kind.check_settings(task, protocol)
        length = protocol.max_length
        if length > study.recipe.block_length:
            raise UserError(
                f"task {task!r}: max_length {length} is longer than the models' sequences (recipe.block_length {study.recipe.block_length})."
            )

    for_each(space.tasks, check)
    return space


def prepare_tasks(prepared: PreparedStudy, space: Space) -> dict[str, PreparedTask]:
    """Loads, checks and tokenises every task of a space, before anything is trained.

    Raises:
        UserError: what is wrong with the data, of all tasks at once.
    """
    from mlmclm.tasks.prepare_task import prepare_task
    from mlmclm.tasks.registry import get_task

    with bars() as progress:

        def one(task: str) -> PreparedTask:
            return prepare_task(
                get_task(task, prepared.place.task_dirs),
                prepared.corpus.tokenizer,
                space.protocol_for(task),
                prepared.place.store,
                prepared.place.data_root,
                progress=progress,
            )

        return dict(zip(space.tasks, for_each(space.tasks, one), strict=True))


def plan_sweep(space: Space, models: Sequence[SweepModel], tasks: dict[str, PreparedTask], place: Place) -> Planned:
    """The cells of the study's grid that can be named from the results that are there, in the order in which workers take
    them, and those that wait."""
    from mlmclm.sweeps.ledger import Ledger
    from mlmclm.sweeps.starts import plan_cells
    from mlmclm.tasks.registry import get_task

    declarations = {name: get_task(name, place.task_dirs).measured_by(space.metrics) for name in space.tasks}
    data = {name: task.task_data for name, task in tasks.items()}
    recut = [name for name, task in tasks.items() if task.recut]
    return plan_cells(space, models, data, declarations, Ledger(place.store), recut)


def sweep(
    prepared: PreparedStudy,
    space: Space,
    plan: Callable[[], Planned],
    *,
    session: Callable[[], AbstractContextManager[Any]],
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> SweepOutcome:
    """Computes the missing cells; opens a Ray session only if there are any.

    Args:
        plan: `plan_sweep` of this study.

    Raises:
        MlmclmError: some cells failed; all others are kept.
    """
    from mlmclm.sweeps.layers import run_layers
    from mlmclm.sweeps.ledger import Ledger

    restore_exports(prepared, {cell.model for cell in Ledger(prepared.place.store).missing(plan().cells)})
    outcome = run_layers(
        plan,
        store=prepared.place.store,
        data_root=prepared.place.data_root,
        cpus_per_cell=space.cpus_per_cell,
        gpus_per_cell=space.gpus_per_cell,
        device=prepared.study.recipe.device,
        max_concurrent=space.max_concurrent,
        on_result=on_result,
        session=session,
        name=f"{prepared.study.name}-sweep",
    )
    outcome.check()
    return outcome


def analyse_study(prepared: PreparedStudy, space: Space, results: Sequence[dict[str, Any]]) -> Analysis:
    """All tables of the study; cells that have no result yet count as missing."""
    from mlmclm.analysis.analyse import analyse
    from mlmclm.analysis.results import Grid

    study = prepared.study
    return analyse(
        results,
        study.baseline,
        grid=Grid(
            tuple(study.models),
            space.tasks,
            space.learning_rates,
            space.seeds,
            {task: tuple(space.settings_for(task)) for task in space.tasks},
        ),
        rule=space.rule,
    )


@contextmanager
def bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Turns (what, done, total) calls into one bar a `what`."""
    with ExitStack() as stack:
        current: list[Bar] = []

        def show(what: str, done: int, total: int | None) -> None:
            if not current or current[0].title != what:
                stack.pop_all().close()
                current[:] = [stack.enter_context(Bar(what, total))]
            current[0].update(done, total)

        yield show
