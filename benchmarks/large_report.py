"""Time and size of a large study's analysis and report:  python -m benchmarks.large_report

The results are simulated: the 15,120 cells of examples/paper.yaml (42 models, 12 tasks, 6 learning rates, 5 seeds), with scores
that depend on model, task, rate and seed. `analyse` and `write_report` are those of a user's study, the
paper's claims included. Run it on one core: `taskset -c 0 python -m benchmarks.large_report`. Its table is a section of RESULTS.md.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import machine, write_section
from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.results import Record
from mlmclm.answers.named_facts import phase_facts
from mlmclm.plans.names import parse_name
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts
from mlmclm.reports.write_report import write_report
from mlmclm.studies.study_file import StudyFile, load_study
from mlmclm.sweeps.space import find_space
from mlmclm.tasks.declared_tasks import get_task

STUDY = Path(__file__).parents[1] / "examples" / "paper.yaml"
BEST, STEP_COST, NOISE = 3, 0.01, 0.008
"""Place of the best rate; what each step away from it costs; the standard deviation of a run."""


def facts_of(file: StudyFile) -> StudyFacts:
    """Return the facts of the published study, without those that only trained models have."""
    space = find_space("paper")
    plans = {name: parse_name(name) for name in file.models}
    models = [
        ModelFacts(name, "pretrained", size=plan.size, phases=phase_facts(plan), tokens=plan.steps)
        for name, plan in plans.items()
    ]
    tasks = [TaskFacts(task.name, task.title, task.family, task.metric) for task in map(get_task, space.tasks)]
    return StudyFacts("paper", "", tuple(models), tuple(tasks), claims=file.find_claims())


def results_of(facts: StudyFacts) -> list[Record]:
    """Return a result for each cell of the grid."""
    generator, space = np.random.default_rng(0), find_space("paper")
    results: list[dict[str, Any]] = []
    for model in facts.models:
        for task in facts.tasks:
            level = generator.normal(0.7, 0.02)
            for place, rate in enumerate(space.learning_rates):
                for seed in space.seeds:
                    scores = level - STEP_COST * abs(place - BEST) + generator.normal(0, NOISE, 2)
                    results.append(
                        {
                            "key": f"{len(results):064x}", "model": model.name, "task": task.name,
                            "family": task.family, "metric": task.metric, "learning_rate": rate, "seed": seed,
                            "status": "ok", "steps": 1000, "tokens": 1, "parameters": 1,
                            "scores": {"validation": {task.metric: scores[0]}, "test": {task.metric: scores[1]}},
                        }
                    )  # fmt: skip
    return results


def main() -> None:
    """Measure, print and write."""
    facts = facts_of(load_study(STUDY))
    results = results_of(facts)
    began = time.perf_counter()
    analysis = analyse(results)
    assert analysis.smallest, "the smallest differences are part of what is timed"
    analysed = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        page = write_report(analysis, facts, Path(folder))["report"]
        written = time.perf_counter() - began
        size = page.stat().st_size
    lines = [
        f"Command: `taskset -c 0 python -m benchmarks.large_report`. Machine: {machine()}.",
        "",
        "| results | models | tasks | analysis, s | report with claims, s | page, MB |",
        "|---|---|---|---|---|---|",
        f"| {len(results):,} | {len(facts.models)} | {len(facts.tasks)} | {analysed:.1f} | {written:.1f} | {size / 1e6:.1f} |",
    ]
    write_section("A large study's report", lines)


if __name__ == "__main__":
    main()
