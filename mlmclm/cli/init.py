"""`mlmclm init`: write a study to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from mlmclm.cli.output import show


def init(
    folder: Annotated[Path, Argument(help="Folder to write to; created if it does not exist.")] = Path(),
) -> None:
    """Writes a commented study (study.yaml) and its search space (space.yaml) to edit. Files that exist are not overwritten.

    Example: mlmclm init my_study
    """
    from mlmclm.studies.new_study import new_study

    study, space = new_study(folder)
    show(f"{study}: the study\n{space}: its search space\nWhat it would compute: mlmclm study {study} --dry-run")
