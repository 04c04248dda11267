"""Facts of a state of pretraining for cards and reports: its training, tokens and FLOPs; none depends on when, where or how fast it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from mlmclm.schedules.decay import DECAYS

SAMPLED_BLOCKS = 1024
"""Number of corpus blocks whose documents are used as a sample of all documents when FLOPs are counted."""


def state_facts(
    name: ModelName,
    state: State,
    recipe: Recipe,
    corpus: AnyCorpus,
    sources: Mapping[str, CorpusConfig],
    trained: list[dict[str, Any]],
    initial: StoredInitial | None = None,
) -> dict[str, Any]:
    """Return the facts for the card of a state.

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
