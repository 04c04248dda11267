"""A file that somebody adds beside those with checksums is told apart from damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmclm.corpora.notes import damage_of_export, note_written
from mlmclm.errors import UserError
from mlmclm.storage.checksums import checked, write_checksums


def test_a_file_added_to_an_exported_folder_is_no_damage(tmp_path: Path) -> None:
    """sentence-transformers, PEFT and the like write their own beside the model's."""
    (tmp_path / "config.json").write_text("{}")
    note_written(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert damage_of_export(tmp_path) is None
    (tmp_path / "config.json").write_text("[]")
    assert damage_of_export(tmp_path) == "config.json is not what was written: its checksum differs"


def test_an_added_file_that_would_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    write_checksums(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer_config.json has been added.* Delete it\."):
        checked(tmp_path, ["tokenizer.json", "tokenizer_config.json"], "Delete it.")
