"""A large state is divided among files, and each worker copies, writes and sends its own."""

from __future__ import annotations

import json
import random
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pretraining_engine import HEAD, run

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.checkpoints import TrainingState, read_tensors
from mlmclm.pretraining.parts import names_by_part, owner, part_names
from mlmclm.pretraining.peers import Peers
from mlmclm.storage.addresses import MANIFEST, fetch_folder
from mlmclm.storage.files import hash_file
from mlmclm.storage.objects import ObjectPath, bucket_of
from object_stores import HURRY
from state_writers import write_by_threads

LIMIT = 40_000

SCRIPT = HEAD + '''
import dataclasses
generator = torch.Generator().manual_seed(0)

def keep(name, state):
    """Write a state as the callbacks do; return the error of this worker."""
    peers = checkpoints.writers(state, name, rank, world)
    try:
        if rank < peers.world:
            with peers.together():
                if rank == 0:
                    checkpoints.write_folder(Path(folder) / name, state, {}, [], peers=peers)
                else:
                    checkpoints.write_share(Path(folder) / name, state, peers)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

for case in cases:
    recipe = Recipe.model_validate(dict(batch=8, block_length=16, workers=world, zero_stage=case["zero"], precision="fp32"))
    model = build_model(eurobert, 0)
    if case.get("start"):
        start = checkpoints.read_tensors(Path(folder) / case["start"])
    else:
        weights = weights_of(model)
        moments = ({name: torch.rand(weight.shape, generator=generator) for name, weight in weights.items()} for _ in range(2))
        start = checkpoints.TrainingState(3, weights, *moments)
    create = Host.create
    if case["zero"] == 1:  # as between machines
        Host.create = lambda: None
    engine = Engine(PretrainingModel(model, precision="fp32"), recipe, partitioning_of(recipe), start, part_bytes=case["limit"])
    Host.create = create
    if case.get("steps"):
        ids = torch.arange(8 * 16).view(8, 16).split(8 // world)[rank] + 4
        engine.step([(ids, ids)], Masked(40), rate=1e-2)
    state = engine.state(3)
    # Callbacks that run on rank 0 alone may have tensors, too.
    if rank == 0:
        state = dataclasses.replace(state, callbacks={"mean": {"a": torch.ones(3), "steps": 3}})
    name, write = case["name"], checkpoints.write_parts
    if case.get("failing") == rank:
        def fail(*given):
            raise OSError(28, "No space left on device")
        checkpoints.write_parts = fail
    error = keep(name, state)
    checkpoints.write_parts = write
    held = [kind + name for kind, tensors in zip("mvw", (state.first, state.second, state.weights)) for name in tensors]
    (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps({"error": error, "held": len(held), "all": len(sum(state.parts, []))}))
    if case.get("whole"):
        engine.part_bytes = 2**40
        keep(name + "-whole", engine.state(3))
    distributed.barrier()
'''  # fmt: skip


def case(name: str, zero: int = 0, limit: int = LIMIT, **given: Any) -> dict[str, Any]:
    """A state taken up and written again, after a step with `steps`, and as one file too with `whole`."""
    return {"name": name, "zero": zero, "limit": limit, **given}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    run(folder, 1, [case("start", limit=2**40), case("one", start="start")], SCRIPT)
    cases = [
        *(case(f"two-zero{zero}", zero, start="start") for zero in (0, 1, 3)),
        *(case(f"trained-zero{zero}", zero, start="start", steps=True, whole=True) for zero in (0, 1, 3)),
        case("again", 3, limit=2**40, start="one"),
        *(case(f"failing-{rank}", start="start", failing=rank) for rank in (0, 1)),
        case("after", start="start"),
    ]
    run(folder, 2, cases, SCRIPT)
    return folder


def notes(folder: Path, name: str) -> list[dict[str, Any]]:
    """The notes of two workers about a case."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def equal(one: TrainingState, other: TrainingState) -> bool:
    pairs = [(one.weights, other.weights), (one.first, other.first), (one.second, other.second)]
    return all(
        a.keys() == b.keys() and len(a) > 0 and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )


def test_every_tensor_is_in_one_part_of_at_most_the_limit_whatever_the_order() -> None:
    chance = random.Random(0)
    for _ in range(200):
        sizes = {f"w/{number}": chance.randint(1, 150) for number in range(chance.randint(1, 40))}
        parts = names_by_part(sizes, 100)
        assert sorted(name for part in parts for name in part) == sorted(sizes)
        assert all(len(part) == 1 or sum(sizes[name] for name in part) <= 100 for part in parts)
        shuffled = dict(chance.sample(list(sizes.items()), len(sizes)))
        assert names_by_part(shuffled, 100) == parts
        total = sum(sizes.values())
        assert len(names_by_part(sizes, total)) == 1 and (len(parts) == 1) == (len(sizes) == 1 or total <= 100)
    assert part_names(1) == ["state.safetensors"]
    assert part_names(4)[3] == "state-00004-of-00004.safetensors"


@pytest.mark.parametrize(("parts", "world"), [(1, 8), (9, 64), (57, 64), (64, 64), (100, 8), (4, 1)])
def test_parts_are_spread_evenly_over_workers_and_nodes_and_the_first_is_rank_0_s(parts: int, world: int) -> None:
    owners = [owner(part, parts, world) for part in range(parts)]
    assert owners[0] == 0 and owners == sorted(owners) and max(owners) < world
    for group in (1, min(8, world)):  # workers, nodes
        counts = [sum(own // group == place for own in owners) for place in range(world // group)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_two_workers_write_the_files_of_one_byte_for_byte_under_every_zero_stage(runs: Path, zero: int) -> None:
    found, expected = files(runs / f"two-zero{zero}"), files(runs / "one")
    assert len([name for name in expected if name.startswith("state-")]) > 5 and "state.safetensors" not in expected
    assert found == expected
    assert states.damage(runs / "one") is None
    assert sum(note["held"] for note in notes(runs, f"two-zero{zero}")) == notes(runs, f"two-zero{zero}")[0]["all"]
    assert all(note["held"] > 0 for note in notes(runs, f"two-zero{zero}")), "each worker holds some tensors"


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_parts_have_the_tensors_of_the_one_file(runs: Path, zero: int) -> None:
    parts, whole, start = (
        read_tensors(runs / name) for name in (f"trained-zero{zero}", f"trained-zero{zero}-whole", "start")
    )
    assert (runs / f"trained-zero{zero}-whole" / "state.safetensors").is_file()
    assert equal(parts, whole) and not equal(parts, start)
    assert parts.callbacks["mean"]["steps"] == 3 and torch.equal(parts.callbacks["mean"]["a"], torch.ones(3))


def test_a_state_in_parts_of_one_worker_is_taken_up_by_two(runs: Path) -> None:
    assert equal(read_tensors(runs / "again"), read_tensors(runs / "start"))
    assert files(runs / "again") == files(runs / "start")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_s_failed_write_fails_all_with_its_reason_and_leaves_nothing(runs: Path, rank: int) -> None:
    errors = [note["error"] for note in notes(runs, f"failing-{rank}")]
    assert all("the disk is full" in error for error in errors)
    assert errors[1 - rank].startswith(f"PeerError: worker {rank} on ")
    assert not list(runs.glob(f"*failing-{rank}/")) and not list(runs.glob(f".failing-{rank}.*"))
    assert files(runs / "after") == files(runs / "one"), "the next write succeeds"


def test_a_state_that_lacks_a_part_is_refused(runs: Path, tmp_path: Path) -> None:
    kept = files(runs / "one")
    for name in kept.keys() - {part_names(len([name for name in kept if name.startswith("state-")]))[2]}:
        (tmp_path / name).write_bytes(kept[name])
    with pytest.raises(UserError, match=r"not a complete pretraining state .*state-00003-of"):
        read_tensors(tmp_path)
    assert states.damage(tmp_path) == f"{(kept.keys() - files(tmp_path).keys()).pop()} is missing"


@pytest.fixture
def state() -> TrainingState:
    """Six weights in three parts."""
    weights = {f"{number}": torch.full((100,), float(number)) for number in range(6)}
    return TrainingState(5, weights, {}, {}, parts=[[f"w/{number}", f"w/{number + 3}"] for number in range(3)])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_each_worker_sends_its_parts_to_the_address_and_the_manifest_comes_last(
    tmp_path: Path, state: TrainingState, elsewhere: bool
) -> None:
    url = f"memory://{uuid.uuid4().hex}/prefix"
    bucket_of(url).availability.retry = HURRY
    name = url.replace("://", "++").replace("/", "+")
    one, two, third = (tmp_path / each / name / "states" / ("0" * 16) for each in ("one", "two", "three"))
    errors = write_by_threads(state, [one, two], elsewhere=elsewhere, broken=1)
    assert all(error is not None and "NoneType" in error for error in errors)
    assert MANIFEST not in [path.name for path in ObjectPath(url).iterdir()] and not fetch_folder(third)
    assert write_by_threads(state, [one, two], elsewhere=elsewhere) == [None, None]
    assert one.is_dir() != elsewhere, "a machine that lacks parts has no folder that looks whole"
    assert not two.exists() and not [path for path in tmp_path.glob("*/*/states/.*") if path.is_dir()]
    assert fetch_folder(third) and states.damage(third) is None
    found = read_tensors(third).weights
    assert found.keys() == state.weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in state.weights.items())
    assert len([path for path in ObjectPath(url).iterdir() if path.parent.name == "objects"]) == len(files(third))


def test_workers_without_a_part_change_nothing(tmp_path: Path, state: TrainingState) -> None:
    assert write_by_threads(state, [tmp_path / "few"] * 2) == [None] * 2
    assert write_by_threads(state, [tmp_path / "many"] * 5) == [None] * 5
    assert files(tmp_path / "few") == files(tmp_path / "many")
    assert len(files(tmp_path / "few")) == 3 + len(("step.json", "state.json", "metrics.jsonl", "checksums.json"))


def test_without_a_shared_folder_and_an_address_the_error_says_what_is_needed(
    tmp_path: Path, state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SEEN_WITHIN", 1.0)
    errors = write_by_threads(state, [tmp_path / "one", tmp_path / "two"], elsewhere=True)
    assert all(error is not None and "a folder that all nodes share, or at an address" in error for error in errors)
    assert not list(tmp_path.iterdir())


class OtherMachine(Peers):
    """A worker whose rank 0 writes into a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.rank, self.folder = 1, folder

    def told(self, name: str) -> dict[str, Any]:
        return {"path": str(self.folder)}


def test_a_machine_waits_for_a_shared_folder_to_show_and_says_if_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, late = TrainingState(1, {"a": torch.zeros(1)}, {}, {}), tmp_path / "late"
    threading.Timer(0.2, late.mkdir).start()
    checkpoints.write_share(tmp_path / "state", state, OtherMachine(late))
    assert (late / "state.safetensors").is_file()
    monkeypatch.setattr(checkpoints, "SEEN_WITHIN", 0.0)
    with pytest.raises(EnvironmentFault, match="is not seen here"):
        checkpoints.write_share(tmp_path / "state", state, OtherMachine(tmp_path / "elsewhere"))


def test_a_state_that_another_process_has_just_written_stays_and_the_address_gets_one_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, sent = tmp_path / "state", dict[str, str]()
    state = TrainingState(1, {"a": torch.zeros(1)}, {}, {})
    wrote = checkpoints.write_tensors

    def beaten(folder: Path, given: TrainingState) -> list[str]:
        monkeypatch.setattr(checkpoints, "write_tensors", wrote)
        checkpoints.write_folder(target, state, {}, [{"step": 1, "time": 1.0}])
        return wrote(folder, given)

    def upload(folder: Path, files: dict[str, Any], to: Path) -> None:
        sent.update({name: hash_file(folder / name) for name in files})
        assert all(noted["sha256"] == sent[name] for name, noted in files.items())

    monkeypatch.setattr(checkpoints, "upload", upload)
    monkeypatch.setattr(checkpoints, "write_tensors", beaten)
    checkpoints.write_folder(target, state, {}, [{"step": 1, "time": 2.0}])
    assert json.loads((target / "metrics.jsonl").read_text())["time"] == 1.0 and states.damage(target) is None
    assert sent["metrics.jsonl"] != hash_file(target / "metrics.jsonl")


def test_a_state_of_which_a_part_is_missing_is_none(tmp_path: Path) -> None:
    state = TrainingState(1, {"a": torch.zeros(1)}, {}, {}, parts=[["w/a"], ["w/b"]])
    with pytest.raises(EnvironmentFault, match="no worker has written state-00002-of-00002"):
        checkpoints.write_folder(tmp_path / "state", state, {}, [])
    assert not (tmp_path / "state").exists()
