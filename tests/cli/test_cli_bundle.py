"""`mlmclm bundle --push-to-hub` uploads what it has written, as a data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlmclm.models.hub import push
from small_hub import Hub


def test_a_folder_with_its_folders_is_uploaded_as_a_data_set(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    (tmp_path / "examples").mkdir()
    for name in ("README.md", "results.csv", "examples/sst2.parquet"):
        (tmp_path / name).write_bytes(b"---\npretty_name: small\n---\n")
    push(tmp_path, "me/small", "small: 12 cells", data_set=True)
    asked = hub.asked[0][1]
    assert asked["type"] == "dataset" and (asked.get("private") is True or asked.get("visibility") == "private")
    assert set(hub.repositories["me/small"].files("main")) == {"README.md", "results.csv", "examples/sst2.parquet"}


def test_without_a_token_nothing_is_written(hub: Hub, tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    code, output = run("bundle", "quickstart", "--to", tmp_path / "out", "--push-to-hub", "me/small")
    assert code == 2 and "no access token" in output and not (tmp_path / "out").exists()
