"""A study to edit, written from the packaged quickstart."""

from __future__ import annotations

import re
from pathlib import Path

from mlmclm.errors import UserError
from mlmclm.storage.files import write_atomic
from mlmclm.storage.packaged import SPACES
from mlmclm.studies.packaged_studies import EXAMPLES

STUDY, SPACE = "study.yaml", "space.yaml"
STUDY_HEAD = """\
# A study: which encoders are pretrained on which text, and on which tasks they are fine-tuned.
#   mlmclm study study.yaml --dry-run     says what would be computed
#   mlmclm study study.yaml               computes it; the same command resumes
# Paths are relative to this file. As it is, it takes six to twelve minutes on two cores, and needs no download.
"""
SPACE_HEAD = """\
# A search space: learning rates x seeds x tasks, and how models are fine-tuned. `mlmclm tasks` lists all tasks.
"""


def new_study(folder: Path) -> list[Path]:
    """Write a commented study file and its search space to a folder, which is created if needed; return their paths.

    Raises:
        UserError: one of the files exists.
    """
    paths = [folder / STUDY, folder / SPACE]
    for path in paths:
        if path.exists():
            raise UserError(f"{path}: it exists and is not overwritten; name another folder.")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-") or "study"
    study = re.sub(r"(?m)^name: .*$", f"name: {name}", _without_head(EXAMPLES / "quickstart.yaml"))
    study = re.sub(r"(?m)^space: .*$", f"space: {SPACE}             # learning rates x seeds x tasks", study)
    for path, text in zip(
        paths, (STUDY_HEAD + study, SPACE_HEAD + _without_head(SPACES / "quickstart.yaml")), strict=True
    ):
        write_atomic(path, text)
    return paths


def _without_head(path: Path) -> str:
    """Return a file without the comments at its beginning."""
    return re.sub(r"\A(#.*\n)+", "", path.read_text(encoding="utf-8"))
