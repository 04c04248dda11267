"""The documentation of a store is what it was at its first use, whatever is installed later."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_corpora import BPE, SMALL, build

from mlmclm.corpora import tokenising
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.prepare_corpus import find_corpus, prepare_corpus
from mlmclm.errors import UserError
from mlmclm.pydocs import documentation as pydocs
from mlmclm.pydocs.documentation import fingerprint, prepare_pydocs
from mlmclm.pydocs.pin import pin_file, settled, write_pin
from mlmclm.pydocs.tasks import PYDOCS_TASKS
from mlmclm.pydocs.tasks import build as build_task

Install = Callable[[], str]


@pytest.fixture
def install(packages: Path, tmp_path: Path, environment: list[pydocs.Root], monkeypatch: pytest.MonkeyPatch) -> Install:
    """Changes the environment: one package more; returns its fingerprint."""

    def change() -> str:
        site = tmp_path / "site"
        shutil.copytree(packages, site)
        (site / "newcomer.py").write_text('"""This package was installed later than all the others."""\n')
        monkeypatch.setattr(pydocs, "installed_roots", lambda: [pydocs.Root(site, "folder")])
        return fingerprint()

    return change


def forget(store: Path) -> None:
    """Makes of a store one of a version that settled nothing."""
    shutil.rmtree(pin_file(store).parent)


def test_what_is_installed_later_changes_neither_corpus_nor_tasks_and_nothing_is_read_again(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    first = build("pydocs", store)
    tasks = [build_task(name, store, workers=1) for name in PYDOCS_TASKS]
    assert install() != settled(store)
    monkeypatch.setattr(pydocs, "_write", None)
    config = CorpusConfig(source="pydocs", validation_fraction=0.1)
    found = find_corpus(config, BPE, block_length=16, store=store)
    assert found is not None and found.key == first.key == build("pydocs", store).key
    assert [build_task(name, store) for name in PYDOCS_TASKS] == tasks
    # Neither another corpus nor a task that was lost is made of what is installed now.
    other = build("pydocs", store, length=32)
    assert json.loads((other.folder / "index.json").read_text())["source_fingerprint"] == settled(store)
    shutil.rmtree(tasks[0])
    assert build_task(PYDOCS_TASKS[0], store, workers=1) == tasks[0]


def test_a_store_of_a_version_without_pins_keeps_its_corpus(install: Install, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = build("pydocs", store)
    forget(store)
    install()
    config = CorpusConfig(source="pydocs", validation_fraction=0.1)
    found = find_corpus(config, BPE, block_length=16, store=store)
    assert found is not None and found.key == first.key
    assert not pin_file(store).exists(), "looking writes nothing"
    assert build("pydocs", store).key == first.key
    assert settled(store) == json.loads(pin_file(store).read_text())["fingerprint"]
    shutil.rmtree(prepare_pydocs(store))
    forget(store)
    assert build("pydocs", store).key == first.key, "the corpus alone says it too"


def test_of_several_documentations_of_an_older_store_the_one_with_trained_models_is_kept(
    install: Install, tmp_path: Path
) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    keys = {}
    first = build("pydocs", store)
    keys[settled(store)] = first.key
    install()
    second = build("pydocs", other)
    keys[settled(other)] = second.key
    forget(other)
    forget(store)
    shutil.copytree(other / "corpora", store / "corpora", dirs_exist_ok=True)
    for age, fingerprint_of in enumerate(keys):
        os.utime(store / "corpora" / f"pydocs-{fingerprint_of}", (1e9 + age, 1e9 + age))
    assert [settled(store)] == list(keys)[:1], "the one that was used first"
    for number, key in enumerate((first.key, second.key, second.key)):
        state = store / "states" / str(number) / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps({"corpus": key}))
    assert keys[settled(store)] == second.key


def test_a_deleted_pin_takes_the_documentation_of_what_is_installed_now(install: Install, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = build("pydocs", store)
    before = settled(store)
    now = install()
    pin_file(store).unlink()
    assert settled(store) is None
    second = build("pydocs", store)
    assert (settled(store), second.key != first.key) == (now, True)
    write_pin(store, before)
    assert build("pydocs", store).key == first.key


def test_a_preparation_that_was_interrupted_goes_on_with_the_same_text_after_packages_changed(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 2000)
    whole = build("pydocs", tmp_path / "whole", shard_mib=SMALL)

    class Stopped(Exception):
        pass

    def stop(what: str, done: int, total: int | None, *_: object) -> None:
        if what == "tokenising" and done > 5000:
            raise Stopped

    store = tmp_path / "store"
    config = CorpusConfig(source="pydocs", validation_fraction=0.1, shard_mib=SMALL)
    with pytest.raises(Stopped):
        prepare_corpus(config, BPE, block_length=16, store=store, workers=1, progress=stop)
    assert list((store / "corpora" / whole.key).glob("*.bin"))
    install()
    resumed = build("pydocs", store, shard_mib=SMALL)
    files = [{path.name: path.read_bytes() for path in made.folder.iterdir()} for made in (whole, resumed)]
    assert files[0] == files[1]


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


def test_a_damaged_pin_is_named_with_the_remedy(environment: list[pydocs.Root], tmp_path: Path) -> None:
    first = build("pydocs", tmp_path)
    pin_file(tmp_path).write_text('{"fingerprint": 7}')
    with pytest.raises(UserError, match=rf"{pin_file(tmp_path)}: .*Delete the folder {pin_file(tmp_path).parent}"):
        build("pydocs", tmp_path)
    forget(tmp_path)
    assert build("pydocs", tmp_path).key == first.key


def test_a_documentation_that_was_set_aside_as_damaged_is_never_adopted(tmp_path: Path) -> None:
    for age, name in enumerate(("a" * 16 + ".damaged", "b" * 16)):
        folder = tmp_path / "corpora" / f"pydocs-{name}"
        folder.mkdir(parents=True)
        os.utime(folder, (1e9 + age, 1e9 + age))
    assert settled(tmp_path) == "b" * 16


@pytest.mark.parametrize("content", ['{"corpus": ', "[]"])
def test_a_damaged_index_of_an_older_store_is_named_with_the_remedy(content: str, tmp_path: Path) -> None:
    index = tmp_path / "corpora" / "0123456789abcdef" / "index.json"
    index.parent.mkdir(parents=True)
    index.write_text(content)
    with pytest.raises(UserError, match=rf"{index}.* Delete {index.parent}"):
        settled(tmp_path)
