"""A store at an address: what one machine finishes, another one finds there."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from mlmclm.errors import MissingBucket, UserError
from mlmclm.pretraining import states
from mlmclm.storage.addresses import address_of, bring_files, is_local, local_store, send, send_file, send_files
from mlmclm.storage.artifact import FolderArtifact
from mlmclm.storage.checksums import write_checksums
from mlmclm.storage.leases import ObjectLeases
from mlmclm.storage.objects import ObjectPath, bucket_of
from object_stores import HURRY, DisturbedStore
from object_stores import address as address
from object_stores import disturbed as disturbed

KEY = "0123456789abcdef"


class Thing(FolderArtifact):
    """A folder with two files of equal content and one in a subfolder."""

    kind = part = "things"
    again = "the test"

    def made(self) -> Path:
        """Return its folder, made if there is none."""
        return self.ensure(write_files)


def write_files(folder: Path) -> None:
    (folder / "deep").mkdir()
    for name, text in (("a", "content"), ("b", "content"), ("deep/c", "else")):
        (folder / name).write_text(text)


def refuse(folder: Path) -> None:
    raise AssertionError("it is there and must not be made")


def store_of(url: str, machine: Path) -> Path:
    """A machine's folder of the store at an address."""
    return machine / url.replace("://", "++").replace("/", "+")


@pytest.fixture
def memory() -> str:
    """An address in this process's memory."""
    url = f"memory://{uuid.uuid4().hex}/prefix"
    bucket_of(url).availability.retry = HURRY
    return url


def test_a_folder_that_one_machine_makes_is_whole_on_another(address: str, tmp_path: Path) -> None:
    made = Thing(store_of(address, tmp_path / "one"), KEY).made()
    there = Thing(store_of(address, tmp_path / "two"), KEY)
    assert isinstance(there.leases, ObjectLeases)
    assert [each.key for each in Thing.all(there.store)] == [KEY]
    folder = there.ensure(refuse)
    assert there.damage() is None
    for name in ("a", "b", "deep/c", "checksums.json"):
        assert (folder / name).read_bytes() == (made / name).read_bytes()
    there.remove()
    assert not ObjectPath(address).iterdir()


def test_equal_contents_are_one_object(memory: str, tmp_path: Path) -> None:
    Thing(store_of(memory, tmp_path), KEY).made()
    objects = [path for path in ObjectPath(memory).iterdir() if "/objects/" in path.url]
    assert len(objects) == 3  # of a and b, of c, and of the checksums


def test_without_a_manifest_there_is_nothing(memory: str, tmp_path: Path) -> None:
    thing = Thing(store_of(memory, tmp_path / "one"), KEY)
    thing.made()
    (ObjectPath(memory) / "things" / KEY / "manifest.json").unlink()
    assert not Thing(store_of(memory, tmp_path / "two"), KEY).find()


def test_what_is_damaged_at_the_address_is_made_again(
    memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Thing(store_of(memory, tmp_path / "one"), KEY).made()
    for path in ObjectPath(memory).iterdir():
        if "/objects/" in path.url:
            path.write_bytes(b"damaged")
    two = Thing(store_of(memory, tmp_path / "two"), KEY)
    assert not two.find()
    assert "is not what was sent" in capsys.readouterr().err
    assert two.damage(read=True) is not None
    two.made()
    assert Thing(store_of(memory, tmp_path / "three"), KEY).ensure(refuse).is_dir()


def test_what_is_damaged_here_is_fetched_again(memory: str, tmp_path: Path) -> None:
    thing = Thing(store_of(memory, tmp_path), KEY)
    (thing.made() / "a").write_text("damaged")
    assert (thing.ensure(refuse) / "a").read_text() == "content"


def test_a_part_of_a_folder_that_came_first_stays(memory: str, tmp_path: Path) -> None:
    one, two = (store_of(memory, tmp_path / name) for name in ("one", "two"))
    made = Thing(one, KEY).made()
    (made / "model").mkdir()
    (made / "model" / "config.json").write_text("{}")
    send(made / "model")
    (two / "things" / KEY / "model").mkdir(parents=True)
    (two / "things" / KEY / "model" / "own").write_text("own")
    assert Thing(two, KEY).find()
    assert (two / "things" / KEY / "model" / "own").is_file()


def test_files_that_change_are_those_of_the_address(memory: str, tmp_path: Path) -> None:
    one, two = (store_of(memory, tmp_path / name) / "studies" for name in ("one", "two"))
    for name in ("small/cells.json", "small/models/m/weights", "small/.lock"):
        (one / name).parent.mkdir(parents=True, exist_ok=True)
        (one / name).write_text("1")
    send_files(one / "small")
    bring_files(two)
    assert [path.relative_to(two).as_posix() for path in two.rglob("*") if path.is_file()] == ["small/cells.json"]
    (one / "small" / "cells.json").write_text("2")
    send_file(one / "small" / "cells.json")
    bring_files(two)
    assert (two / "small" / "cells.json").read_text() == "2"
    assert is_local(two / "small" / "cells.json") and not is_local(two / "small" / "none.json")


@pytest.mark.slow
def test_a_fault_at_any_request_of_a_folder_changes_nothing(disturbed: DisturbedStore, tmp_path: Path) -> None:
    proxy = disturbed.proxy
    Thing(store_of(disturbed.url, tmp_path / "calm"), KEY).made()
    Thing(store_of(disturbed.url, tmp_path / "calm2"), KEY).ensure(refuse)
    requests = len(proxy.seen)
    kinds = ("500", "503", "cut", "lost response", "truncated", "damaged")
    for number in range(requests):
        url = f"{disturbed.url}/{number}"
        proxy.clear()
        proxy.inject(kinds[number % len(kinds)], skip=number)
        Thing(store_of(url, tmp_path / f"{number}-one"), KEY).made()
        folder = Thing(store_of(url, tmp_path / f"{number}-two"), KEY).ensure(refuse)
        assert sorted(path.name for path in folder.rglob("[!.]*")) == ["a", "b", "c", "checksums.json", "deep"]


def test_a_machine_goes_on_from_the_latest_checkpoint_of_another(memory: str, tmp_path: Path) -> None:
    one, two = (store_of(memory, tmp_path / name) / "runs" / KEY for name in ("one", "two"))
    for step in (5, 10):
        folder = one / "ray_train" / "stage-1" / f"checkpoint_{step}"
        folder.mkdir(parents=True)
        (folder / "step.json").write_text(f'{{"step": {step}}}')
        write_checksums(folder)
        send(folder, to=states.sent_as(one, step))
        states.drop_earlier(one, step)
    assert [step for step, _ in states.checkpoints(one)] == [10]
    states.bring_checkpoint(two)
    ((step, found),) = states.checkpoints(two)
    assert step == 10 and states.damage(found) is None
    assert len([path for path in ObjectPath(memory).iterdir() if path.name == "manifest.json"]) == 1
    states.end_run(two)
    assert not two.exists() and not ObjectPath(memory).iterdir()


def test_workers_of_another_machine_start_from_what_the_first_one_chose(memory: str, tmp_path: Path) -> None:
    """The first worker's machine went down before it sent the checkpoint; the other machine has an older one."""
    one, two = (store_of(memory, tmp_path / name) / "runs" / KEY for name in ("one", "two"))
    chosen, brought, older = (
        run / "ray_train" / "stage-1" / name
        for run, name in ((one, "checkpoint_9"), (two, "checkpoint_9"), (two, "checkpoint_8"))
    )
    for folder, step in ((chosen, 9), (older, 8)):
        folder.mkdir(parents=True)
        (folder / "step.json").write_text(f'{{"step": {step}}}')
        write_checksums(folder)
    sent = states.send_start(one, chosen)
    states.bring_start(two, brought, of=sent)
    assert [found for _, found in states.checkpoints(two)] == [brought] and states.damage(brought) is None
    (brought / "step.json").write_text('{"step": 8}')
    with pytest.raises(UserError, match=r"checkpoint_9 on \S+: step.json .* Delete this folder there"):
        states.bring_start(two, brought, of=sent)


def test_a_path_of_a_store_says_its_address(tmp_path: Path) -> None:
    store = tmp_path / "s3++bucket+some+prefix"
    assert str(address_of(store / "states" / KEY)) == f"s3://bucket/some/prefix/states/{KEY}"
    assert address_of(tmp_path / "store" / "states") is None


def test_wrong_addresses_of_a_store_are_named(
    disturbed: DisturbedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLMCLM_STORE_FOLDER", str(tmp_path))
    with pytest.raises(UserError, match=r"unknown kind of object store 's4'. Did you mean 's3'"):
        local_store("s4://bucket/prefix")
    with pytest.raises(UserError, match=r"allowed is PROTOCOL://BUCKET/PREFIX without '\+'"):
        local_store("s3://bucket/a+b")
    with pytest.raises(MissingBucket, match="there is no bucket s3://absent"):
        local_store("s3://absent/prefix")
    assert local_store("s3://bucket/prefix") == (tmp_path / "s3++bucket+prefix").resolve()
