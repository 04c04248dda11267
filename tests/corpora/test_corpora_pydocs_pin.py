"""The documentation of a store is what it was at its first use, whatever is installed later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_corpora import BPE, build

from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.prepare_corpus import find_corpus
from mlmclm.errors import UserError
from mlmclm.pydocs import documentation as pydocs
from mlmclm.pydocs.documentation import environment_fingerprint, prepare_pydocs
from mlmclm.pydocs.pin import pin_file, resolved, write_pin
from mlmclm.pydocs.tasks import PYDOCS_TASKS
from mlmclm.pydocs.tasks import build as build_task

Install = Callable[[], str]


@pytest.fixture
def install(packages: Path, tmp_path: Path, environment: list[Path], monkeypatch: pytest.MonkeyPatch) -> Install:
    """Changes the environment: one package more; returns its fingerprint."""

    def change() -> str:
        site = tmp_path / "site"
        shutil.copytree(packages, site)
        (site / "newcomer.py").write_text('"""This package was installed later than all the others."""\n')
        (site / "newcomer-1.0.dist-info").mkdir()
        monkeypatch.setattr(pydocs, "installed_roots", lambda: [site / "no standard library", site])
        return environment_fingerprint()

    return change


def test_what_is_installed_later_changes_neither_corpus_nor_tasks_and_nothing_is_read_again(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    first = build("pydocs", store)
    tasks = [build_task(name, store) for name in PYDOCS_TASKS]
    assert install() != resolved(store)
    monkeypatch.setattr(pydocs, "_write", None)
    config = CorpusConfig(source="pydocs", validation_fraction=0.1)
    found = find_corpus(config, BPE, block_length=16, store=store)
    assert found is not None and found.key == first.key == build("pydocs", store).key
    assert [build_task(name, store) for name in PYDOCS_TASKS] == tasks
    # Neither another corpus nor a task that was lost is made of what is installed now.
    other = build("pydocs", store, length=32)
    assert json.loads((other.folder / "index.json").read_text())["source_fingerprint"] == resolved(store)
    shutil.rmtree(tasks[0])
    assert build_task(PYDOCS_TASKS[0], store) == tasks[0]


def test_a_deleted_pin_takes_the_documentation_of_what_is_installed_now(install: Install, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = build("pydocs", store)
    before = resolved(store)
    now = install()
    pin_file(store).unlink()
    assert resolved(store) is None
    second = build("pydocs", store)
    assert (resolved(store), second.key != first.key) == (now, True)
    write_pin(store, before)
    assert build("pydocs", store).key == first.key


def test_a_lost_shard_is_made_again_of_the_kept_documentation_and_without_it_the_message_says_what_to_do(
    install: Install, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first = build("pydocs", store)
    lost = first.folder / first.train.shards[0].file
    content = lost.read_bytes()
    install()
    lost.unlink()
    assert build("pydocs", store).key == first.key
    assert lost.read_bytes() == content
    lost.unlink()
    documents = prepare_pydocs(store)
    shutil.rmtree(documents)
    with pytest.raises(
        UserError, match=rf"{documents}: no such folder.*Restore the folder; or delete {pin_file(store)}"
    ):
        build("pydocs", store)
    assert not documents.exists() and not lost.exists()


def test_a_damaged_pin_is_named_and_without_its_folder_the_store_s_documentation_is_taken_again(
    install: Install, tmp_path: Path
) -> None:
    first = build("pydocs", tmp_path)
    install()
    pin_file(tmp_path).write_text('{"fingerprint": 7}')
    with pytest.raises(UserError, match=rf"{pin_file(tmp_path)}: .*Delete the folder {pin_file(tmp_path).parent}"):
        build("pydocs", tmp_path)
    shutil.rmtree(pin_file(tmp_path).parent)
    assert resolved(tmp_path) is not None and not pin_file(tmp_path).exists(), "looking writes nothing"
    assert build("pydocs", tmp_path).key == first.key


def test_of_several_documentations_without_a_pin_the_user_says_which(tmp_path: Path) -> None:
    folders = [
        tmp_path / "corpora" / f"pydocs-{letter * 16}{end}" for letter, end in (("a", ".damaged"), ("c", ""), ("b", ""))
    ]
    for folder in folders:
        folder.mkdir(parents=True)
    with pytest.raises(
        UserError, match=rf"{pin_file(tmp_path)} is missing.*several.*: pydocs-b{{16}}, pydocs-c{{16}}\. Move all"
    ):
        resolved(tmp_path)
    folders[2].rename(tmp_path / "away")
    assert resolved(tmp_path) == "c" * 16
