"""A small study with another model and another recipe, and a worker that is killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlmclm.plans.recipe import Recipe
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import PreparedStudy, prepare_study
from mlmclm.studies.study_file import load_study


def prepared(study_path: Path, store: Path, *models: str, **recipe: Any) -> PreparedStudy:
    """Prepare the study of `write_study` with these models and changes of its recipe."""
    study = load_study(study_path)
    changed = Recipe.model_validate(study.recipe.model_dump() | recipe)
    changed_study = study.model_copy(update={"models": models, "baseline": None, "recipe": changed})
    return prepare_study(changed_study, Place(store, study_path.parent / "data"))


def dying_at(number: int) -> Callable[[dict[str, Any]], None]:
    """Return a worker's function that kills rank 1 before this step of each stage, the first time.

    It leaves a file `killed-` in the store, with the step at which the stage began.
    """

    def run_until_killed(config: dict[str, Any]) -> None:
        import os
        import signal

        from mlmclm.launches.worker_entry import run_in_worker
        from mlmclm.pretraining.engine import Engine

        job, step = config["job"], Engine.step

        def counted(engine: Any, *arguments: Any, **named: Any) -> Any:
            engine.steps_taken = getattr(engine, "steps_taken", 0) + 1
            mark = job.store / f"killed-{job.stage.start.step}"
            if engine.rank == 1 and engine.steps_taken == number and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return step(engine, *arguments, **named)

        Engine.step = counted  # type: ignore[method-assign]
        run_in_worker(config)

    return run_until_killed


def dying_in_a_write(part_bytes: int) -> Callable[[dict[str, Any]], None]:
    """Return a worker's function that divides states, and kills rank 1 in the middle of a write, the first time.

    It leaves the file `killed` in the store, with the folder that was written to.
    """

    def run_until_killed(config: dict[str, Any]) -> None:
        import os
        import signal
        from dataclasses import replace

        from mlmclm.launches.worker_entry import run_in_worker
        from mlmclm.pretraining import checkpoints

        job, write = replace(config["job"], part_bytes=part_bytes), checkpoints.write_parts

        def write_or_die(folder: Path, state: Any) -> list[str]:
            mark = job.store / "killed"
            if os.environ["RANK"] == "1" and state.step == 15 and state.second and not mark.exists():
                mark.write_text(str(folder))
                (folder / "state-00009-of-00009.safetensors").write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            return write(folder, state)

        checkpoints.write_parts = write_or_die
        run_in_worker({**config, "job": job})

    return run_until_killed
