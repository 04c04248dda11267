"""Claims that the plan of a study can settle, of those that the study tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mlmclm.analysis.planned_power import PlannedPower
from mlmclm.plans.stages import history
from mlmclm.reports.claim_pairs import PairFinder, Traits, traits_of
from mlmclm.reports.planned_claims import ClaimPlan, PlannedClaims
from mlmclm.reports.study_facts import ModelFacts
from mlmclm.studies.claim_files import claims_of
from mlmclm.studies.report_facts import named_facts
from mlmclm.studies.study_file import StudyFile
from mlmclm.studies.study_sweep import StudySweep


def planned_claims(
    sweep: StudySweep,
    planned: PlannedPower | None,
    families: Mapping[str, str],
    seeds: int,
    zero_shot: Collection[str] = (),
) -> PlannedClaims:
    """Say of each claim that a study tests whether its plan can settle it; of none where no model's pretraining is known.

    Args:
        planned: what the sweep will be able to find; None if no noise is known.
        families: the family of each task.
        seeds: the fewest seeds of a task.
        zero_shot: the tasks that models answer without training.
    """
    plan = ClaimPlan(
        PairFinder(_traits(sweep), families),
        {} if planned is None else planned.effects,
        seeds,
        1 if planned is None else planned.runs,
        zero_shot,
    )
    return plan.planned(claims_of(sweep.file) if plan.finder.models else ())


def _traits(sweep: StudySweep) -> list[Traits]:
    """Return the features of the models whose plans are known, each once, whatever its number of pretraining runs."""
    file, found = sweep.file, []
    given = file.initial if isinstance(file, StudyFile) else {}
    for name, plan in sweep.plans.items():
        if name not in sweep.replicate_of:
            tokens = history(plan, file.recipe).tokens(file.recipe) if isinstance(file, StudyFile) else None
            facts = ModelFacts(name, "pretrained", tokens=tokens, **named_facts(plan))
            found.append(traits_of(replace(facts, phases=(), since=facts.phases) if plan.size in given else facts))
    return [each for each in found if each is not None]
