"""Facts that a study's report shows beside the scores.

None of them depends on when, where or how fast anything ran, except `StudyFacts.provenance`, which records just this, and the
times in `StudyFacts.basis`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlmclm.errors import UserError
from mlmclm.plans.names import ModelName, Phase, replicates_among
from mlmclm.reports.basis import Basis, basis_of
from mlmclm.reports.figures.loss_curves import MOST_POINTS, thinned
from mlmclm.reports.paired_models import way_made
from mlmclm.reports.provenance import ComputedWork, cell_work, provenance, stage_work
from mlmclm.reports.study_facts import Continuation, Kind, ModelFacts, PhaseFacts, StudyFacts, TaskFacts
from mlmclm.results.examples import GROUP
from mlmclm.storage.files import read_json
from mlmclm.studies.claim_files import claims_of
from mlmclm.studies.facts import card_facts, shared_settings, source_facts, tokens_by_source
from mlmclm.studies.packaged_studies import packaged_studies
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.study_sweep import StudySweep, SweptModel
from mlmclm.studies.zero_shot import zero_shot_facts
from mlmclm.sweeps.ledger import Ledger
from mlmclm.tasks.declared_tasks import get_task

LENGTHS = ("max_length", "stride")
"""Settings that follow from a model's context where the protocol gives lengths as a share of it."""
QUESTION = "Which of these models suits these tasks best, at which learning rate, and how sure can we be?"
"""The question of a study whose models are given."""


def study_facts(sweep: StudySweep, results: Sequence[Mapping[str, Any]], command: str, basis: Basis) -> StudyFacts:
    """Return the facts that the report shows beside the results.

    Args:
        results: the results of all cells; only their records of how they were computed are used.
        command: the command that computes the study again.
        basis: what `study_basis` returns for the same arguments.
    """
    file, space, prepared = sweep.file, sweep.space, sweep.prepared
    settings: dict[str, Any] = {"metrics": space.metrics, "rule": space.rule}
    if space.start_from:
        settings["start_from"] = space.start_from
    settings |= space.common_settings() | space.axes() | space.of_models()
    if prepared is None and not _one_length(sweep):  # then each model has lengths of its own
        settings = {key: value for key, value in settings.items() if key not in LENGTHS}
    plan = () if prepared is None else prepared.plan.stages
    return StudyFacts(
        name=file.name,
        command=command,
        baseline=file.baseline,
        tasks=tuple(_task_facts(name, sweep) for name in space.tasks),
        learning_rates=space.learning_rates,
        seeds=space.seeds,
        protocol={key: _plain(value) for key, value in settings.items()},
        provenance=provenance(
            []
            if prepared is None
            else [work for each in plan if (work := stage_work(*prepared.trained(each))) is not None],
            # By key, because two names of the same weights share their cells and the work counts once.
            [cell_work(result) for result in {result["key"]: result for result in results}.values()],
            corpus=None if prepared is None else prepared.corpus.key,
            tasks={name: task.task_data for name, task in sweep.tasks.items()},
        ),
        zero_shot=zero_shot_facts(file, sweep.place),
        basis=basis,
        claims=claims_of(file),
        **(_of_given(sweep) if prepared is None else _of_trained(prepared)),
    )


def study_basis(sweep: StudySweep, results: Sequence[Mapping[str, Any]], command: str) -> Basis:
    """Return what the study's results have cost, what they rest on, and how more are asked for.

    Args:
        results, command: as for `study_facts`.
    """
    ledger, examples = Ledger(sweep.place.store), dict[str, int]()
    for result in results:
        if result["task"] not in examples and result["status"] == "ok":
            try:
                examples[result["task"]] = ledger.examples(result).rows
            except UserError:  # they are damaged or not kept; another cell of the task may have them
                continue
    return basis_of(
        results,
        command,
        packaged=packaged_studies(),
        test_examples=examples,
        pretraining=() if sweep.prepared is None else _pretrained_once(sweep.prepared),
    )


def _pretrained_once(prepared: PreparedStudy) -> list[ComputedWork]:
    """Return how the stages of first replicates were computed."""
    further = replicates_among({str(name): name for name in prepared.plan.models})
    first = [stage for stage in prepared.plan.stages if any(name not in further for name in stage.models)]
    return [work for stage in first if (work := stage_work(*prepared.trained(stage))) is not None]


def _of_trained(prepared: PreparedStudy) -> dict[str, Any]:
    """Return the facts of a study that trains its models: these, the corpus and the recipe."""
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

    def about(each: SweptModel) -> str:
        length = "" if shared else f" Its sequences have at most {each.space.protocol.max_length} tokens."
        return f"Is {each.source}.{length}"

    shared, plans = _one_length(sweep), sweep.plans
    models = tuple(
        ModelFacts(
            each.model.name,
            "external",
            description=about(each),
            **named_facts(plans.get(each.model.name, ModelName(""))),
        )
        for each in sweep.models
    )
    return {"models": models, "question": QUESTION}


def named_facts(name: ModelName) -> dict[str, Any]:
    """Return what a model's name says of its pretraining."""
    return {"size": name.size, "made": made(name), "phases": phase_facts(name)}


def _one_length(sweep: StudySweep) -> bool:
    """Return whether the sequences of all given models have the length of the protocol."""
    given = sweep.space.protocol
    return given.length_share is None and all(
        each.space.protocol.max_length == given.max_length for each in sweep.models
    )


def _task_facts(name: str, sweep: StudySweep) -> TaskFacts:
    task = get_task(name, sweep.place.task_dirs).measured_by(sweep.space.metrics)
    rows = read_json(sweep.tasks[name].folder / "meta.json")["rows"].items()
    source = f"{task.source} ({task.licence})" if task.licence else task.source
    source += f"; test examples grouped by {task.group}" if task.group else ""
    counts = {part: int(count) for part, count in rows if part != GROUP}
    return TaskFacts(name, task.title, task.family, task.metric, counts, source)


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
    same = ("name", "size", "parameters", "steps", "tokens", "flops", "validation_loss")
    return ModelFacts(
        **{key: facts[key] for key in same},
        kind=kind,
        stages=tuple(facts["stages"]),
        # A bundle has these facts, and of 16,000 steps it would have megabytes.
        curve=tuple(thinned(facts["curve"], 2 * MOST_POINTS)),
        validation_curve=tuple(facts["validation_curve"]),
        description=f"{'Continues from' if name.phases else 'Is'} {initial.source}." if initial is not None else "",
        switches=tuple(phase.until for phase in name.phases[:-1] if phase.until < facts["steps"]),
        # How a given model was made is not known.
        made=made(name) if initial is None else "",
        phases=phase_facts(name) if initial is None else (),
        continued=continuation(name, given=initial is not None),
        since=() if initial is None else phase_facts(name),
        finished="" if name.checkpoint is None else str(replace(name, checkpoint=None)),
    )


def phase_facts(name: ModelName) -> tuple[PhaseFacts, ...]:
    """Return the phases of a model as far as it was trained."""
    trained = _trained(name)
    starts = (0, *(phase.until for phase in trained))
    return tuple(
        PhaseFacts(
            objective=str(phase.objective),
            kind=phase.objective.name,
            causal=phase.objective.causal,
            steps=min(phase.until, name.steps) - start,
            hidden_share=phase.objective.hidden_share,
            decayed=phase.decayed,
        )
        for start, phase in zip(starts, trained, strict=False)
    )


def _trained(name: ModelName) -> tuple[Phase, ...]:
    """Return the phases in which a model has taken steps; an intermediate checkpoint has not reached the last ones."""
    starts = (0, *(phase.until for phase in name.phases))
    return tuple(phase for start, phase in zip(starts, name.phases, strict=False) if start < name.steps)


def continuation(name: ModelName, *, given: bool = False) -> Continuation | None:
    """Return what a model's pretraining continues; None if it was trained in one go, or not at all.

    Args:
        given: whether the size stands for given weights, from which its phases go on.
    """
    trained = _trained(name)
    ends = [place for place, phase in enumerate(trained[:-1], 1) if phase.decayed]
    if not trained or not (ends or given):
        return None
    before, since = (trained[: ends[-1]], trained[ends[-1] :]) if ends else ((), trained)
    # Given weights have no replicates.
    base = ModelName(
        name.size,
        (*before[:-1], *(replace(phase, decayed=False) for phase in before[-1:])),
        replicate=name.replicate if before else 1,
    )
    return Continuation(
        base=str(base),
        start=_objectives(before) if before else name.size,
        objective=_objectives(since),
        steps=name.steps - base.steps,
    )


def _objectives(phases: Sequence[Phase]) -> str:
    return " then ".join(str(phase.objective).upper() for phase in phases)


def made(name: ModelName) -> str:
    """Return how a model was made, one of `paired_models.MADE`, or ""."""
    return way_made(phase_facts(name))
