"""Facts of a study's models, data and tasks that its report and the models' cards show; none depends on when, where or how fast anything ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mlmclm.analysis.results import records
from mlmclm.answers.named_facts import continuation, named_facts, phase_facts
from mlmclm.corpora.chunks import Chunks
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.mixed_blocks import in_turns, rows_of_length
from mlmclm.corpora.mixed_corpus import AnyCorpus, PreparedSources
from mlmclm.corpora.mixes import mix_text
from mlmclm.corpora.row_lengths import document_lengths, row_lengths
from mlmclm.corpora.tokenizer import special_ids
from mlmclm.models.sizes import Size, parameters
from mlmclm.numbers import rate_text
from mlmclm.plans.costs import segment_flops
from mlmclm.plans.names import ModelName
from mlmclm.plans.phases import TrainingPhase
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import samples_by_source
from mlmclm.plans.stages import State, history
from mlmclm.pretraining.initial import StoredInitial, shape
from mlmclm.reports.figures.loss_curves import MOST_POINTS, thinned
from mlmclm.reports.study_facts import Kind, ModelFacts, StudyFacts, TaskFacts
from mlmclm.results.examples import GROUP
from mlmclm.schedules.decay import DECAYS
from mlmclm.storage.files import read_json
from mlmclm.studies.place import Place
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.study_file import StudyFile
from mlmclm.studies.study_sweep import StudySweep, SweptModel
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import find_tasks
from mlmclm.tasks.splits import hub_data

SAMPLED_BLOCKS = 1024
"""Number of corpus blocks whose documents are used as a sample of all documents when FLOPs are counted."""


def card_facts(prepared: PreparedStudy, name: ModelName) -> dict[str, Any]:
    """Return the facts for a model's card; none of them depends on when or where the model was trained."""
    study, state, initial = prepared.study, prepared.target(name), prepared.initial.get(name.size)
    trained = prepared.curve(name)
    facts = state_facts(name, state, study.recipe, prepared.corpus, study.sources, trained, initial)
    return facts | study_card(study, name)


def study_card(study: StudyFile, name: ModelName) -> dict[str, Any]:
    """Return the facts for a model's card that only the study file has."""
    siblings = [model for model in study.models if model != str(name)]
    return {**study.card.model_dump(), "siblings": siblings}


def reported_scores(place: Place, folder: Path, model: SweepModel) -> list[dict[str, Any]]:
    """Return a model's rows of the last report's `best.csv` that have a score, with the Hub's data set of each, if any, as `data`.

    The list is empty if the report was made for other weights.
    """
    best, cells = folder / "best.csv", folder / "results.csv"
    if not best.is_file() or not cells.is_file():
        return []
    keys = [row["key"] for row in records(pd.read_csv(cells)) if row["model"] == model.name]
    result = ResultsStore(place.store).find(keys[0]) if keys else None
    if result is None or result["weights"] not in model.hashes:
        return []
    rows = pd.read_csv(best, dtype={"learning_rates": str, "setting": str}).fillna({"setting": ""})
    scored = [row for row in records(rows) if row["model"] == model.name and row["n"] > 0]
    on_hub = {name: hub_data(task) for name, task in find_tasks(place.task_dirs).items()}
    return [row | {"data": on_hub.get(row["task"], {})} for row in scored]


def state_facts(
    name: ModelName,
    state: State,
    recipe: Recipe,
    corpus: AnyCorpus,
    sources: Mapping[str, CorpusConfig],
    trained: list[dict[str, Any]],
    initial: StoredInitial | None = None,
) -> dict[str, Any]:
    """Return the facts for the card of any state, as `card_facts` does for a study's model.

    Args:
        sources: what the corpus is made from, by the name of the source ("" for a single corpus).
        trained: the state's metrics from the first step on.
        initial: the given model that the state continues from, if any.
    """
    objective = name.last_objective
    size = shape(name.size, initial)
    vocabulary = size.vocabulary or corpus.vocabulary  # a given model keeps its own
    validation = [(record["step"], record["validation_loss"]) for record in trained if "validation_loss" in record]
    seen = tokens_by_source(state, recipe, corpus)
    return {
        "name": str(name),
        "size": name.size,
        "architecture": size.architecture,
        "initial": initial.source if initial is not None else None,
        "base_model": initial.source.partition("@")[0] if initial is not None and initial.commit else None,
        "shape": {
            "layers": size.layers,
            "hidden": size.hidden,
            "intermediate": size.intermediate,
            "heads": size.heads,
            "key-value heads": size.key_value_heads,
            "longest training sequence, tokens": max(state.lengths(recipe)),
        },
        "parameters": parameters(size, vocabulary),
        "stages": list(stage_texts(name, recipe)),
        "objective": str(objective) if objective is not None else None,
        "causal": objective is not None and objective.causal,
        "predicts_one_earlier": objective is not None and objective.predicts_one_earlier,
        "steps": state.step,
        "tokens": sum(seen.values()),
        "flops": flops(state, recipe, size, vocabulary, corpus),
        "recipe": shared_settings(recipe),
        "corpus": {
            **source_facts(corpus, sources, recipe, seen),
            "documents": corpus.documents,
            "tokens": corpus.tokens,
            "vocabulary": corpus.vocabulary,
        },
        "validation_loss": validation[-1][1] if validation else None,
        "validation_curve": validation,
        "curve": [(record["step"], record["loss"]) for record in trained if record.get("loss") is not None],
    }


def source_facts(
    corpus: AnyCorpus, made_from: Mapping[str, CorpusConfig], recipe: Recipe, seen: Mapping[str, int]
) -> dict[str, str]:
    """Return where a corpus comes from; for a mix, what each source has, and how much of it was `seen`, in tokens."""
    if "" in made_from:
        return {"source": made_from[""].source}
    assert isinstance(corpus, PreparedSources)
    # With phases, the plan shows their mixes.
    rows = {} if recipe.has_phases else {"mix": mix_text(recipe.mix or ())}
    for name, source in corpus.sources.items():
        tokens = seen.get(name, 0)
        rows[f"source {name}"] = (
            f"{made_from[name].source}: {source.documents:,} documents, {source.tokens:,} tokens; {tokens:,} tokens seen "
            f"({tokens / source.tokens:.3g} times)"
        )
    return rows


def stage_texts(name: ModelName, recipe: Recipe) -> Iterator[str]:
    """Yield one line for each phase of a model's training."""
    if recipe.phases_of(name.size):
        yield from _phase_texts(name, recipe)
        return
    start, decay_steps = 0, recipe.decay_steps if DECAYS[recipe.decay].decays else 0
    for index, phase in enumerate(name.phases):
        stop = min(phase.until, name.steps)
        if start >= stop:
            return
        # The last phase and `dec` phases end in a decay, but an intermediate checkpoint may stop before it begins.
        decays, begin = phase.decayed or index == len(name.phases) - 1, phase.until - decay_steps
        decay = f", the last {stop - begin} with decaying rate" if decays and stop > begin else ""
        yield f"steps {start} to {stop}: {phase.objective.words}{decay}"
        start = stop


def _phase_texts(name: ModelName, recipe: Recipe) -> Iterator[str]:
    for segment in history(name, recipe).segments:
        phase = segment.phase
        assert phase is not None
        decay = f", {phase.decay} decay over {phase.decay_steps:,} steps to {phase.final_share:.0%}"
        warmup = f", warm-up {phase.warmup_steps:,} steps" if phase.warmup_steps else ""
        growth, batch = phase.batch_warmup, f"{phase.batch:,}"
        if growth is not None:
            batch = f"{growth.first:,} growing to {batch} over {growth.steps:,} steps"
        bases = {"RoPE base": phase.rope_base, "local RoPE base": phase.local_rope_base}
        rope = "".join(f", {title} {base:g}" for title, base in bases.items() if base is not None)
        moments = ", new optimiser moments" if phase.moments == "new" else ""
        mix = f", of {mix_text(phase.mix)}" if phase.mix is not None else ""
        yield (
            f"steps {segment.start} to {segment.stop} ({phase.name}): {segment.objective.words}, batches of {batch} x {phase.block_length:,} tokens, "
            f"peak rate {rate_text(phase.peak_learning_rate)}{warmup}{decay if phase.decay_steps else ''}, "
            f"weight decay {phase.weight_decay:g}{rope}{moments}{mix}"
        )


def flops(state: State, recipe: Recipe, size: Size, vocabulary: int, corpus: AnyCorpus) -> int:
    """Return the model FLOPs of all segments of a state (`plans.costs.segment_flops`).

    The earlier training of a model that it continues from is not included.
    """
    total = 0
    for segment in state.segments:
        phase_recipe = recipe.during(segment.phase)
        documents = _some_documents(corpus, phase_recipe) if recipe.isolates else None
        filled = 1.0
        if recipe.rows == "chunks" and documents is not None:
            filled = float(documents.mean()) / phase_recipe.block_length
        total += segment_flops(size, segment, recipe, vocabulary, documents, filled=filled)
    return total


def tokens_by_source(state: State, recipe: Recipe, corpus: AnyCorpus) -> dict[str, int]:
    """Return the number of tokens that a state was trained on, by source; the only source of a study without mixes is "".

    A chunk counts as the mean chunk length of its source; padding is not counted.
    """
    tokens = Counter[str]()
    for (name, length), samples in samples_by_source(state.segments, recipe).items():
        rows = rows_of_length(corpus.sources[name].train, length, recipe.rows, corpus.tokenizer)
        tokens[name] += round(samples * rows.table.tokens / len(rows)) if isinstance(rows, Chunks) else samples * length
    return dict(tokens)


def shared_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's settings without those that each phase has for itself."""
    phase_settings = TrainingPhase.model_fields if recipe.has_phases else ()
    return {name: value for name, value in recipe.identity().items() if name not in phase_settings}


def _some_documents(corpus: AnyCorpus, recipe: Recipe) -> NDArray[np.int64]:
    """Return the lengths of documents, or of their chunks, in rows sampled evenly from the training part as a phase reads it."""
    sequences = rows_of_length(corpus.train, recipe.block_length, recipe.rows, corpus.tokenizer, recipe.mix)
    blocks = in_turns(sequences, recipe.mix)
    sampled = np.linspace(0, len(blocks) - 1, min(len(blocks), SAMPLED_BLOCKS)).astype(np.int64)
    lengths = row_lengths if recipe.rows == "chunks" else document_lengths
    return lengths(blocks.take(sampled), special_ids(corpus.tokenizer)["eos"])


LENGTHS = ("max_length", "stride")
"""Settings that depend on a model's context if the protocol states lengths as a share of it."""
QUESTION = "Which of these models suits these tasks best, at which learning rate, and how sure can we be?"
"""The question of a study whose models are given."""


def study_facts(sweep: StudySweep) -> StudyFacts:
    """Return facts that the report shows beside the results, without command, zero-shot results, claims, costs and provenance."""
    file, space, prepared = sweep.file, sweep.space, sweep.prepared
    settings: dict[str, Any] = {"metrics": space.metrics, "rule": space.rule}
    if space.start_from:
        settings["start_from"] = space.start_from
    settings |= space.common_settings() | space.axes() | space.of_models()
    if prepared is None and not _one_length(sweep):  # then the lengths differ between models
        settings = {key: value for key, value in settings.items() if key not in LENGTHS}
    return StudyFacts(
        name=file.name,
        command="",
        tasks=tuple(_task_facts(task, sweep.tasks[name].folder) for name, task in sweep.declared().items()),
        protocol={key: _plain(value) for key, value in settings.items()},
        **(_of_given(sweep) if prepared is None else _of_trained(prepared)),
    )


def _of_trained(prepared: PreparedStudy) -> dict[str, Any]:
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
        "recipe": {key: _plain(value) for key, value in shared_settings(recipe).items()},
    }


def _of_given(sweep: StudySweep) -> dict[str, Any]:
    """Return the facts of a study whose models are given."""

    def about(swept: SweptModel) -> str:
        length = "" if shared else f" Its sequences have at most {swept.space.protocol.max_length} tokens."
        return f"Is {swept.source}.{length}"

    shared, plans = _one_length(sweep), sweep.plans
    models = tuple(
        ModelFacts(
            swept.model.name,
            "external",
            description=about(swept),
            **named_facts(plans.get(swept.model.name, ModelName(""))),
        )
        for swept in sweep.models
    )
    return {"models": models, "question": QUESTION}


def _one_length(sweep: StudySweep) -> bool:
    """Return whether the sequences of all given models have the length of the protocol."""
    protocol = sweep.space.protocol
    return protocol.length_share is None and all(
        swept.space.protocol.max_length == protocol.max_length for swept in sweep.models
    )


def _task_facts(task: Task, folder: Path) -> TaskFacts:
    rows = read_json(folder / "meta.json")["rows"].items()
    source = f"{task.source} ({task.licence})" if task.licence else task.source
    source += f"; test examples grouped by {task.group}" if task.group else ""
    counts = {part: int(count) for part, count in rows if part != GROUP}
    return TaskFacts(task.name, task.title, task.family, task.metric, counts, source)


def _plain(value: Any) -> str | int | float | bool | None:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return value if isinstance(value, str | int | float | bool) or value is None else ", ".join(map(str, value))


def _model_facts(prepared: PreparedStudy, name: ModelName) -> ModelFacts:
    facts, initial = card_facts(prepared, name), prepared.initial.get(name.size)
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
