"""Facts of a study's models that its report and the models' cards show; none depends on when or where a model was trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mlmclm.analysis.results import records
from mlmclm.corpora.chunks import Chunks
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.mixed_blocks import in_turns, rows_of_length
from mlmclm.corpora.mixed_corpus import AnyCorpus, PreparedSources
from mlmclm.corpora.mixes import words
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
from mlmclm.schedules.decay import DECAYS
from mlmclm.studies.place import Place
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.study_file import StudyFile
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declared_tasks import find_tasks
from mlmclm.tasks.splits import hub_data

SAMPLED_BLOCKS = 1024
"""Number of corpus blocks whose documents stand for all documents when FLOPs are counted."""


def card_facts(prepared: PreparedStudy, name: ModelName) -> dict[str, Any]:
    """Return the facts for a model's card; none of them depends on when or where the model was trained."""
    study, state, initial = prepared.study, prepared.target(name), prepared.initial.get(name.size)
    trained = prepared.curve(name)
    facts = state_facts(name, state, study.recipe, prepared.corpus, study.sources, trained, initial)
    return facts | study_card(study, name)


def study_card(study: StudyFile, name: ModelName) -> dict[str, Any]:
    """Return the facts for a model's card that only the study file has."""
    siblings = [other for other in study.models if other != str(name)]
    return {**study.card.model_dump(), "siblings": siblings}


def reported_scores(place: Place, folder: Path, model: SweepModel) -> list[dict[str, Any]]:
    """Return a model's rows of the last report's `best.csv` that have a score, with the Hub's data set of each, if any, as `data`.

    There are none if the report is of other weights.
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
    # The plan names the mixes of phases.
    rows = {} if recipe.has_phases else {"mix": words(recipe.mix or ())}
    for name, of_source in corpus.sources.items():
        tokens = seen.get(name, 0)
        rows[f"source {name}"] = (
            f"{made_from[name].source}: {of_source.documents:,} documents, {of_source.tokens:,} tokens; {tokens:,} tokens seen "
            f"({tokens / of_source.tokens:.3g} times)"
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
        law = f", the last {stop - begin} with decaying rate" if decays and stop > begin else ""
        yield f"steps {start} to {stop}: {phase.objective.words}{law}"
        start = stop


def _phase_texts(name: ModelName, recipe: Recipe) -> Iterator[str]:
    for segment in history(name, recipe).segments:
        phase = segment.phase
        assert phase is not None
        law = f", {phase.decay} decay over {phase.decay_steps:,} steps to {phase.final_share:.0%}"
        warmup = f", warm-up {phase.warmup_steps:,} steps" if phase.warmup_steps else ""
        grows, batch = phase.batch_warmup, f"{phase.batch:,}"
        if grows is not None:
            batch = f"{grows.first:,} growing to {batch} over {grows.steps:,} steps"
        bases = {"RoPE base": phase.rope_base, "local RoPE base": phase.local_rope_base}
        rope = "".join(f", {title} {base:g}" for title, base in bases.items() if base is not None)
        moments = ", new optimiser moments" if phase.moments == "new" else ""
        mix = f", of {words(phase.mix)}" if phase.mix is not None else ""
        yield (
            f"steps {segment.start} to {segment.stop} ({phase.name}): {segment.objective.words}, batches of {batch} x {phase.block_length:,} tokens, "
            f"peak rate {rate_text(phase.peak_learning_rate)}{warmup}{law if phase.decay_steps else ''}, "
            f"weight decay {phase.weight_decay:g}{rope}{moments}{mix}"
        )


def flops(state: State, recipe: Recipe, size: Size, vocabulary: int, corpus: AnyCorpus) -> int:
    """Return the model FLOPs of all segments of a state (`plans.costs.segment_flops`).

    The earlier training of a model that it continues from is not included.
    """
    total = 0
    for segment in state.segments:
        own = recipe.during(segment.phase)
        documents = _some_documents(corpus, own) if recipe.isolates else None
        filled = 1.0
        if recipe.rows == "chunks" and documents is not None:
            filled = float(documents.mean()) / own.block_length
        total += segment_flops(size, segment, recipe, vocabulary, documents, filled=filled)
    return total


def tokens_by_source(state: State, recipe: Recipe, corpus: AnyCorpus) -> dict[str, int]:
    """Return the number of tokens that a state was trained on, by source; the only source of a study without mixes is "".

    Chunks count without filling, each with the mean of its source.
    """
    found = Counter[str]()
    for (name, length), samples in samples_by_source(state.segments, recipe).items():
        rows = rows_of_length(corpus.sources[name].train, length, recipe.rows, corpus.tokenizer)
        found[name] += round(samples * rows.table.tokens / len(rows)) if isinstance(rows, Chunks) else samples * length
    return dict(found)


def shared_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's settings without those that phases have of their own."""
    ours = TrainingPhase.model_fields if recipe.has_phases else ()
    return {name: value for name, value in recipe.identity().items() if name not in ours}


def _some_documents(corpus: AnyCorpus, recipe: Recipe) -> NDArray[np.int64]:
    """Return the lengths of the documents, or chunks of one, in rows sampled evenly from a phase's training part."""
    every = rows_of_length(corpus.train, recipe.block_length, recipe.rows, corpus.tokenizer, recipe.mix)
    blocks = in_turns(every, recipe.mix)
    rows = np.linspace(0, len(blocks) - 1, min(len(blocks), SAMPLED_BLOCKS)).astype(np.int64)
    lengths = row_lengths if recipe.rows == "chunks" else document_lengths
    return lengths(blocks.take(rows), special_ids(corpus.tokenizer)["eos"])
