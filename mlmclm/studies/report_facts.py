"""Facts that a study's report shows beside the scores; none depends on when, where or how fast anything ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlmclm.answers.named_facts import continuation, made, named_facts, phase_facts
from mlmclm.plans.names import ModelName
from mlmclm.reports.figures.loss_curves import MOST_POINTS, thinned
from mlmclm.reports.study_facts import Kind, ModelFacts, StudyFacts, TaskFacts
from mlmclm.results.examples import GROUP
from mlmclm.storage.files import read_json
from mlmclm.studies.facts import card_facts, shared_settings, source_facts, tokens_by_source
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.study_sweep import StudySweep, SweptModel
from mlmclm.tasks.declared_tasks import get_task

LENGTHS = ("max_length", "stride")
"""Settings that follow from a model's context where the protocol gives lengths as a share of it."""
QUESTION = "Which of these models suits these tasks best, at which learning rate, and how sure can we be?"
"""The question of a study whose models are given."""


def study_facts(sweep: StudySweep) -> StudyFacts:
    """Return facts that the report shows beside the results, without command, zero-shot results, claims, costs and provenance."""
    file, space, prepared = sweep.file, sweep.space, sweep.prepared
    settings: dict[str, Any] = {"metrics": space.metrics, "rule": space.rule}
    if space.start_from:
        settings["start_from"] = space.start_from
    settings |= space.common_settings() | space.axes() | space.of_models()
    if prepared is None and not _one_length(sweep):  # then each model has lengths of its own
        settings = {key: value for key, value in settings.items() if key not in LENGTHS}
    return StudyFacts(
        name=file.name,
        command="",
        baseline=file.baseline,
        tasks=tuple(_task_facts(name, sweep) for name in space.tasks),
        learning_rates=space.learning_rates,
        seeds=space.seeds,
        protocol={key: _plain(value) for key, value in settings.items()},
        **(_of_given(sweep) if prepared is None else _of_trained(prepared)),
    )


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
