"""Preparation of a study: its corpus, tokenizer, models to continue from, and plan; and the batches that its training sees."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.answers.named_facts import continuation, phase_facts
from mlmclm.cluster.ray_cluster import Session, ray_session
from mlmclm.corpora.chunks import Chunks
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.documents import open_source
from mlmclm.corpora.mixed_blocks import rows_of_length
from mlmclm.corpora.mixed_corpus import AnyCorpus, PreparedSources, find_sources, prepare_sources
from mlmclm.corpora.notes import UNTRAINED
from mlmclm.corpora.prepare_corpus import Elsewhere, find_corpus, prepare_corpus
from mlmclm.corpora.tokenizer import check_special, repository_of, special_ids
from mlmclm.errors import UserError
from mlmclm.launches.ray_tokenising import on_cluster
from mlmclm.models.sizes import Size
from mlmclm.plans.names import ModelName
from mlmclm.plans.segments import revision_steps
from mlmclm.plans.stages import Plan, Sources, Stage, State, history, make_plan, study_fingerprint
from mlmclm.pretraining import states
from mlmclm.pretraining.initial import (
    StoredInitial,
    Wanted,
    check_architecture,
    check_initial,
    find_initial,
    first_config,
    prepare_initial,
    source_sizes,
)
from mlmclm.pretraining.seen import FORMATS, TrainingBatch, export, export_data_set, training_batches
from mlmclm.pretraining.state_facts import shared_settings, source_facts, state_facts, tokens_by_source
from mlmclm.progress import say
from mlmclm.reports.figures.losses import MOST_POINTS, thinned
from mlmclm.reports.study_facts import Kind, ModelFacts
from mlmclm.storage.files import first_existing, places_of, read_json
from mlmclm.storage.place import Place
from mlmclm.studies.study_file import StudyFile

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PreparedStudy:
    """A study with its corpus on disk and its plan made."""

    study: StudyFile
    place: Place
    corpus: AnyCorpus
    plan: Plan
    fingerprint: str
    initial: Mapping[str, StoredInitial] = field(default_factory=dict)
    """Given models to continue from, by size; all other sizes begin with random weights."""

    def target(self, name: ModelName) -> State:
        """Return the last state of a model's training, which is the model itself."""
        return self.plan.targets[self.plan.models.index(name)]

    def model_folder(self, name: ModelName) -> Path:
        """Return the path of a model's Hugging Face folder, whether or not it exists."""
        return states.state_folder(self.place.store, self.target(name).key(self.fingerprint)) / "model"

    def curve(self, name: ModelName) -> list[dict[str, Any]]:
        """Return a trained model's metrics from its first step on, one record a step; an empty list if untrained."""
        state = self.target(name)
        return states.curve(self.place.store, state.key(self.fingerprint)) if state.segments else []

    def trained(self, stage: Stage) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return a finished stage's own metrics, one record a step, and its `system_facts`.

        The facts describe the machine and the software on which the stage ended.
        """
        key = stage.end.key(self.fingerprint)
        rows = states.curve(self.place.store, key)
        system = states.read_description(states.StoredState(self.place.store, key).brought().folder).get("system", {})
        return [row for row in rows if row["step"] > stage.start.step], system

    def card_facts(
        self, name: ModelName, state: State | None = None, curve: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return the facts for the card of a model or of a state of its training (`state_facts`).

        Args:
            state: by default the model's last.
            curve: the state's metrics from the first step on; by default those of the last.
        """
        return state_facts(
            name,
            self.target(name) if state is None else state,
            self.study.recipe,
            self.corpus,
            self.study.sources,
            self.curve(name) if curve is None else curve,
            self.initial.get(name.size),
        )

    def write(
        self,
        folder: Path,
        state: State,
        weights: dict[str, Tensor] | None,
        *,
        card: str,
        decoder_card: str | None,
        state_key: str | None = None,
    ) -> None:
        """Write a state as a Hugging Face folder (`models.exported_folder.export_folder`).

        Args:
            weights: None for a fresh initialisation.
            state_key: the state's key, to note in the folder.
        """
        from mlmclm.models.architectures import weights_of
        from mlmclm.models.build import build_model
        from mlmclm.models.exported_folder import export_folder

        resolved, tokenizer = state.resolved(self.study.recipe), self.corpus.tokenizer
        config = first_config(state.size, self.initial.get(state.size), tokenizer, resolved)
        export_folder(
            folder,
            weights_of(build_model(config, resolved.seeds.weights)) if weights is None else weights,
            config,
            tokenizer,
            card=card,
            decoder_card=decoder_card,
            context=resolved.block_length,
            state=state_key,
            objective=str(state.segments[-1].objective) if state.segments else UNTRAINED,
            begins=resolved.rows == "chunks",
        )

    def left(self, stage: Stage) -> tuple[Stage, ...]:
        """Return the untrained parts of a stage, as stages; each leads from a state in the store to states that the store lacks."""
        return states.stages_left(stage, self.place.store, self.fingerprint)

    def unfinished(self) -> list[Stage]:
        """Return the stages that are still to be trained, in an order in which they can run."""
        return [part for stage in self.plan.stages for part in self.left(stage)]


def prepare_study(study: StudyFile, place: Place, *, session: Session | None = None) -> PreparedStudy:
    """Read, tokenise and pack the corpus unless that is done, and make the plan.

    Args:
        session: opens a session on a running Ray cluster; `corpus.workers` decides whether the corpus is tokenised
            there. None if there is no cluster, in which case `corpus.workers: ray` starts one on this machine.

    Raises:
        UserError: something is wrong with the corpus, the tokenizer, a model's name or a model to continue from.
    """
    plan = make_plan(study.parsed, study.recipe)  # first, so that a wrong name fails before any work
    beginning = prepare_initial(_wanted(study, place))
    _check_shapes(study, {name: model.size for name, model in beginning.models.items()})
    corpus = _corpus(study, place, beginning.tokenizer, session)
    check_special(corpus.tokenizer, masked=_masks(plan))
    _check_lengths(study, corpus)
    needed = study.recipe.batch * study.recipe.block_length
    if corpus.tokens < needed:
        raise UserError(
            f"corpus {study.source!r} has {corpus.tokens:,} tokens, fewer than the {needed:,} of one step (recipe.batch {study.recipe.batch:,} x "
            f"recipe.block_length {study.recipe.block_length:,}); use more text, a smaller batch or a shorter block_length."
        )
    return _prepared(study, place, corpus, beginning.models)


def _corpus(study: StudyFile, place: Place, tokenizer: TokenizerConfig, session: Session | None) -> AnyCorpus:
    def elsewhere(corpus: CorpusConfig) -> Elsewhere | None:
        local = session is None and corpus.workers == "ray"
        return on_cluster(partial(ray_session, place.store) if local else session)

    where = _where(study, place)
    if study.corpus is not None:
        return prepare_corpus(study.corpus, tokenizer, **where, elsewhere=elsewhere(study.corpus))
    return prepare_sources(study.sources, study.recipe.mix or (), tokenizer, **where, elsewhere=elsewhere)


def _where(study: StudyFile, place: Place) -> dict[str, Any]:
    """Return the arguments that preparing and finding corpora share."""
    return {
        "block_length": study.recipe.block_length,
        "store": place.store,
        "data_root": place.data_root,
        "beside": study.folder,
    }


def _check_lengths(study: StudyFile, corpus: AnyCorpus) -> None:
    """Refuse phases whose block length leaves the corpus's training or validation part without rows; chunks are counted for this."""
    phases = [phase for size in sorted({name.size for name in study.parsed}) for phase in study.recipe.phases_of(size)]
    read = {(phase.block_length, phase.mix): phase.name for phase in phases}
    for (length, mix), phase in (read or {(study.recipe.block_length, study.recipe.mix): ""}).items():
        for name, _ in mix or (("", 1),):
            source = corpus.sources[name]
            for part, blocks in (("training", source.train), ("validation", source.validation)):
                key = f"corpora.{name}" if name else "corpus"
                rows = rows_of_length(blocks, length, study.recipe.rows, corpus.tokenizer)
                if not len(rows) and isinstance(rows, Chunks):
                    raise UserError(f"{study.at(key)}: no document of its {part} part has a token; use other text.")
                if not len(rows):
                    most = max(shard.blocks for shard in blocks.shards) * blocks.block_length
                    raise UserError(
                        f"{study.at('recipe.phases')}: phase {phase!r}: block_length {length:,} is longer than each shard of the "
                        f"{name or 'corpus'}'s {part} part; allowed are {most:,} tokens at most. Use more text, or larger shards "
                        f"({key}.shard_mib)."
                    )


def find_prepared(study: StudyFile, place: Place) -> PreparedStudy | None:
    """Return the prepared study if `prepare_study` has nothing left to do, else None; raise what `prepare_study` would."""
    beginning, where = find_initial(_wanted(study, place)), _where(study, place)
    if beginning is None:
        return None
    if study.corpus is not None:
        corpus: AnyCorpus | None = find_corpus(study.corpus, beginning.tokenizer, **where)
    else:
        corpus = find_sources(study.sources, study.recipe.mix or (), beginning.tokenizer, **where)
    return None if corpus is None else _prepared(study, place, corpus, beginning.models)


def check_sources(study: StudyFile, place: Place) -> None:
    """Check that every corpus's source and a tokenizer of the Hub exist, without reading them; see `Source.check`."""
    for corpus in study.sources.values():
        open_source(corpus, store=place.store, data_root=place.data_root, beside=study.folder).check()
    if study.tokenizer is not None and study.tokenizer.name is not None:
        repository = repository_of(study.tokenizer.name, study.tokenizer.revision)
        if repository.pinned(place.store) is None:
            repository.commit()


def check_models_to_continue(study: StudyFile, place: Place, plan: Plan) -> None:
    """Check the models to continue from as `prepare_study` would, and raise the same errors, but do no work on them."""
    if study.initial:
        check_initial(_wanted(study, place), masked=_masks(plan))
        _check_shapes(study, source_sizes(study.initial, place.data_root, study.folder))


def _check_shapes(study: StudyFile, sizes: Mapping[str, Size]) -> None:
    """Refuse settings with which the models to continue from, whose sizes are given by name, cannot be trained."""
    trained = {name.size for name in study.parsed if name.steps}
    try:
        for name, size in sizes.items():
            study.recipe.check_positions(name, size)
            if name in trained:
                check_architecture(size.architecture, study.recipe)
    except UserError as error:
        raise UserError(study.at(str(error))) from error


def _masks(plan: Plan) -> bool:
    return any(stage.objective.masks for stage in plan.stages)


def initial_models(study: StudyFile, place: Place) -> Mapping[str, StoredInitial]:
    """Return the models to continue from, by size; none unless the store has them all."""
    beginning = find_initial(_wanted(study, place))
    return {} if beginning is None else beginning.models


def _wanted(study: StudyFile, place: Place) -> Wanted:
    used = frozenset(name.size for name in study.parsed)
    return Wanted(
        study.initial,
        used,
        _tokenizer_of(study),
        block_length=max(study.recipe.lengths(used)),
        store=place.store,
        data_root=place.data_root,
        beside=study.folder,
    )


def _tokenizer_of(study: StudyFile) -> TokenizerConfig | None:
    """Return the study's tokenizer with its path resolved."""
    tokenizer = study.tokenizer
    if tokenizer is None or tokenizer.path is None:
        return tokenizer
    places = places_of(tokenizer.path, study.folder)
    path = first_existing(places)
    if path is None:
        raise UserError(
            f"tokenizer.path: {tokenizer.path}: no such file or folder; looked for {' and '.join(map(str, places))}."
        )
    return tokenizer.model_copy(update={"path": str(path)})


def _prepared(study: StudyFile, place: Place, corpus: AnyCorpus, initial: Mapping[str, StoredInitial]) -> PreparedStudy:
    # The keys of given models, known only now, are part of the keys of the states that continue from them.
    sources: Sources = ()
    shared = corpus.key
    if isinstance(corpus, PreparedSources):
        sources = tuple((name, source.key) for name, source in sorted(corpus.sources.items()))
        shared = corpus.tokenizer.name
    keys = {size: model.key for size, model in initial.items()}
    plan = make_plan(study.parsed, study.recipe, keys, sources, beside=study.beside)
    key = study_fingerprint(
        study.recipe, shared, corpus.vocabulary, padded_with_eos=_padded_with_eos(study, corpus, initial)
    )
    return PreparedStudy(study, place, corpus, plan, key, initial)


def _padded_with_eos(study: StudyFile, corpus: AnyCorpus, initial: Mapping[str, StoredInitial]) -> bool:
    """Return whether any of the study's models uses EOS as its pad token."""
    ids = special_ids(corpus.tokenizer)
    begun = [initial.get(size) for size in {name.size for name in study.parsed}]
    pads = [
        ids["pad"] if model is None else read_json(model.folder / "config.json").get("pad_token_id") for model in begun
    ]
    return ids["eos"] in pads


def with_suite(study: StudyFile, suite: str) -> StudyFile:
    """Return the study with a suite's models, and with the recipe fields that the suite sets.

    Raises:
        UserError: the suite doesn't exist, is invalid, or doesn't fit the study's recipe.
    """
    from mlmclm.plans.suite import find_suite

    chosen = find_suite(suite, study.sizes)
    if lacking := chosen.lacking(study.corpora):
        say(
            f"--suite {suite}: its mixes are left out, and all phases read the study's own text: the study's corpora lack {', '.join(lacking)}."
        )
    recipe = chosen.recipe_over(study.recipe, where=f"--suite {suite}: recipe", sources=study.corpora)
    models = tuple(str(name) for name in chosen.parsed)
    return study.model_copy(update={"models": models, "parts": {}, "baseline": None, "recipe": recipe})


def facts_of_trained(prepared: PreparedStudy) -> dict[str, Any]:
    """Return the facts of a study that trains its models: models, corpus and recipe."""
    study, corpus, recipe = prepared.study, prepared.corpus, prepared.study.recipe
    longest = max(prepared.plan.targets, key=lambda state: state.tokens(recipe))
    return {
        "models": tuple(_model_facts(prepared, name) for name in prepared.plan.models),
        "corpus": {
            **source_facts(corpus, study.sources, recipe, tokens_by_source(longest, recipe, corpus)),
            "documents": corpus.documents,
            "training tokens": len(corpus.train) * recipe.block_length,
            "validation tokens": len(corpus.validation) * recipe.block_length,
            "vocabulary": corpus.vocabulary,
        },
        "recipe": {key: plain(value) for key, value in shared_settings(recipe).items()},
    }


def _model_facts(prepared: PreparedStudy, name: ModelName) -> ModelFacts:
    facts, initial = prepared.card_facts(name), prepared.initial.get(name.size)
    if initial is None:
        kind: Kind = "pretrained" if name.phases else "untrained"
    else:
        kind = "continued" if name.phases else "external"
    copied = ("name", "size", "parameters", "steps", "tokens", "flops", "validation_loss")
    return ModelFacts(
        **{key: facts[key] for key in copied},
        kind=kind,
        stages=tuple(facts["stages"]),
        # A bundle contains these facts; the whole curve of 16,000 steps would take megabytes.
        curve=tuple(thinned(facts["curve"], 2 * MOST_POINTS)),
        validation_curve=tuple(facts["validation_curve"]),
        description=f"{'Continues from' if name.phases else 'Is'} {initial.source}." if initial is not None else "",
        switches=tuple(phase.until for phase in name.phases[:-1] if phase.until < facts["steps"]),
        # How a given model was made is not known.
        phases=phase_facts(name) if initial is None else (),
        continued=continuation(name, given=initial is not None),
        since=() if initial is None else phase_facts(name),
        finished="" if name.checkpoint is None else str(replace(name, checkpoint=None)),
    )


def plain(value: Any) -> str | int | float | bool | None:
    """Return a setting as the report shows it."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return value if isinstance(value, str | int | float | bool) or value is None else ", ".join(map(str, value))


@dataclass(frozen=True)
class SeenData:
    """Batches of a study, in order.

    Attributes:
        steps: counted from 0.
        longest: the model whose steps these are, or the longest of the study.
    """

    prepared: PreparedStudy
    steps: range
    longest: ModelName
    batches: Iterable[TrainingBatch]

    def export(self, to: Path) -> tuple[int, int]:
        """Write a file (.parquet or .jsonl), or a folder that `datasets` reads; return the numbers of rows and tokens."""
        counts, recipe = Counter[str](), self.prepared.study.recipe
        if to.suffix:
            export(_counted(self.batches, counts), to)
        else:
            revisions = revision_steps(history(self.longest, recipe).segments, recipe)
            bounds = revisions or range(0, self.steps.stop, recipe.checkpoint_every)
            export_data_set(_counted(self.batches, counts), self.steps, bounds, to)
        return counts["rows"], counts["tokens"]


def seen_data(
    study: StudyFile,
    place: Place,
    *,
    source: str,
    steps: str | None = None,
    model: str | None = None,
    labels: bool = False,
    to: Path | None = None,
) -> SeenData:
    """Return the batches of a study's steps; its corpus is prepared first.

    Args:
        source: the study, for messages.
        steps: `a:b`, from step a up to but not including b; None for all steps, which needs a folder as `to`.
        model: return this model's inputs, masked; None for the unmasked tokens of the blocks.
        labels: whether to return the labels too.
        to: the file or folder to export to, if any; a folder gets unmasked tokens.

    Raises:
        UserError: the arguments don't go together, or a step is beyond the model's last.
    """
    model = study.model_of(model, where=source) if model is not None else None
    if labels and model is None:
        raise UserError("--labels: labels belong to an objective; name a model of the study with --model.")
    as_folder = to is not None and not to.suffix
    if to is not None and not as_folder and to.suffix not in FORMATS:
        raise UserError(
            f"--export {to}: the end of the name sets the format; allowed: {', '.join(FORMATS)}, or none for a folder."
        )
    if steps is None and not as_folder:
        raise UserError("--steps is missing: give a:b, such as 0:10.")
    if as_folder and labels:
        raise UserError("--labels: a folder gets the tokens before anything is hidden; export to a file to get labels.")
    if model is None and study.recipe.has_phases:
        raise UserError("--model: the study's recipe has phases, in which models may differ; name one of them.")
    longest = max((name for name in study.parsed if model in (None, str(name))), key=lambda name: name.steps)
    wanted = _range(steps, longest.steps, model)
    prepared = prepare_study(study, place)
    corpus, name = prepared.corpus, next((name for name in study.parsed if str(name) == model), None)
    stream = training_batches(
        corpus.train, study.recipe, wanted, model=name, tokenizer=corpus.tokenizer, masked=not as_folder
    )
    batches = stream if labels else (replace(batch, labels=None) for batch in stream)
    return SeenData(prepared, wanted, longest, batches)


def _range(text: str | None, last: int, model: str | None) -> range:
    """Parse `--steps`; None means all steps.

    Args:
        last: steps of the model, or of the longest one of the study.

    Raises:
        UserError: the range is malformed, or goes beyond the model's last step.
    """
    if text is None and not last:
        which = "--model: an untrained model" if model is not None else "a study of untrained models only"
        raise UserError(f"{which} sees no data; name a model that is trained.")
    text = f"0:{last}" if text is None else text
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--steps {text!r}: expected a:b with a < b, such as 0:10.")
    if int(match[2]) > last:
        whose = f"model {model!r} takes" if model is not None else "the longest model of the study takes"
        raise UserError(f"--steps {text!r}: {whose} {last:,} steps; allowed: within 0:{last}.")
    return range(int(match[1]), int(match[2]))


def _counted(batches: Iterable[TrainingBatch], counts: Counter[str]) -> Iterator[TrainingBatch]:
    """Yield the batches, and count their rows and tokens."""
    for batch in batches:
        counts.update(rows=len(batch.blocks), tokens=int(batch.lengths.sum()))
        yield batch
