"""The replications of the two papers: packaged studies by paper and scale, and the plans of the papers themselves."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mlmclm.errors import UserError, unknown
from mlmclm.studies.place import REPLICATIONS
from mlmclm.studies.priced_plan import PricedPlan, price_plan
from mlmclm.studies.study_file import load_study


@dataclass(frozen=True)
class PaperScale:
    """A paper's own scale, which is planned but not computed: the suite of its models, and the commands that would run it."""

    suite: str
    study: str | None
    """The packaged study that has the suite's recipe and the paper's grid of fine-tuning; None if there is none."""
    commands: tuple[tuple[str, str], ...]
    """Commands, by the purpose of each."""

    def priced(self, device: str | None) -> PricedPlan:
        """Return the plan of the suite's pretraining and its costs on a device, as `price_plan` does."""
        return price_plan(suite=self.suite, study=None if self.study is None else Path(self.study), device=device)


PAPERS = {
    "study": PaperScale(
        "paper",
        "paper",
        (
            ("the models above", "mlmclm pretrain paper --suite paper --ray ADDRESS"),
            ("30 of them with the grid below, as in the first version", "mlmclm study paper --ray ADDRESS"),
        ),
    ),
    "ettin": PaperScale(
        "ettin",
        None,
        (
            (
                "the models above, from a study file of yours with Ettin's corpora",
                "mlmclm pretrain FILE --suite ettin --ray ADDRESS",
            ),
        ),
    ),
}
COMPUTED = ("tiny", "small")
SCALES = (*COMPUTED, "paper")


def replication_of(paper: str, scale: str) -> str:
    """Return the name of the packaged study of a paper (`PAPERS`) at a scale that is computed (`COMPUTED`).

    Raises:
        UserError: there is no such paper or scale.
    """
    if paper not in PAPERS:
        raise unknown("paper", paper, PAPERS)
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES, where="--scale")
    return f"replicate-{paper}-{scale}"


def write_replication(name: str, folder: Path) -> list[Path]:
    """Copy a packaged replication to a folder, with the tasks that it names; return the paths, the study's first.

    Raises:
        UserError: a file is there already.
    """
    source = REPLICATIONS / f"{name}.yaml"
    zero_shot = load_study(source).zero_shot
    declared = [REPLICATIONS / task for task in (zero_shot.tasks if zero_shot else ()) if task.endswith(".yaml")]
    tasks = [file for task in declared for file in sorted(task.parent.glob(f"{task.stem}.*"))]
    files = {file: folder / file.relative_to(REPLICATIONS) for file in (source, *tasks)}
    for target in files.values():
        if target.exists():
            raise UserError(f"{target}: it exists and is not overwritten; name another folder.")
    for file, target in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return list(files.values())
