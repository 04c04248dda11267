"""A model that is called without its owner on the Hub gets its full name as a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmclm.errors import UserError
from mlmclm.models.sources import fetch_source
from mlmclm.sweeps.find_model import find_model


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bert-base-uncased", r"On the Hub it is google-bert/bert-base-uncased\."),
        ("ModernBERT-base", r"On the Hub it is answerdotai/ModernBERT-base\."),
        ("my-model", r"A model of the Hub is named OWNER/NAME\."),
        ("./my-model", r"[^R]$"),
    ],
)
def test_the_hint_names_the_owner(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        find_model(name, tmp_path)
    with pytest.raises(UserError, match=hint):
        fetch_source(name)
