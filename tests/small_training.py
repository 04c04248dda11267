"""Trainings of a small study's models, by workers that may be killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlmclm.plans.recipe import Recipe
from mlmclm.studies.place import Place
from mlmclm.studies.prepare import prepare
from mlmclm.studies.prepared_study import PreparedStudy
from mlmclm.studies.study_file import load_study


def prepared(study_path: Path, store: Path, *models: str, **recipe: Any) -> PreparedStudy:
    """The study with these models and changes of its recipe."""
    study = load_study(study_path)
    changed = Recipe.model_validate(study.recipe.model_dump() | recipe)
    made = study.model_copy(update={"models": models, "baseline": None, "recipe": changed})
    return prepare(made, Place(store, study_path.parent / "data"))


def mortal(at: int) -> Callable[[dict[str, Any]], None]:
    """`run_in_worker`, but the first time in each stage rank 1 is killed at this step of its own, and leaves `killed-START`."""

    def die_once(config: dict[str, Any]) -> None:
        import os
        import signal

        from mlmclm.launches.worker_entry import run_in_worker
        from mlmclm.pretraining.engine import Engine

        job, step = config["job"], Engine.step

        def counted(engine: Any, *given: Any, **named: Any) -> Any:
            engine.steps_taken = getattr(engine, "steps_taken", 0) + 1
            mark = job.store / f"killed-{job.start.step}"
            if engine.rank == 1 and engine.steps_taken == at and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return step(engine, *given, **named)

        Engine.step = counted  # type: ignore[method-assign]
        run_in_worker(config)

    return die_once
