"""Reading packed blocks over shards."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from mlmclm.corpora import blocks as module
from mlmclm.corpora.blocks import Blocks, Shard, token_type
from mlmclm.corpora.shelf import Shelf
from mlmclm.errors import UserError
from mlmclm.storage.files import hash_file


def write(folder: Path, sizes: list[int], length: int = 4, kind: str = "<u2") -> tuple[Blocks, np.ndarray]:
    """Shards of these numbers of blocks, and all of their tokens [n_blocks, length]."""
    rows = np.random.default_rng(0).integers(0, 60_000, (sum(sizes), length))
    shards = []
    for number, part in enumerate(np.split(rows, np.cumsum(sizes)[:-1])):
        file = folder / f"train-{number:05d}.bin"
        part.astype(kind).tofile(file)
        shards.append(Shard(file.name, len(part), hash_file(file)))
    return Blocks(Shelf(str(folder)), shards, length, kind), rows


@pytest.mark.parametrize(("vocabulary", "kind"), [(65_536, "<u2"), (65_537, "<u4")])
def test_the_type_holds_every_id(vocabulary: int, kind: str) -> None:
    assert token_type(vocabulary) == np.dtype(kind)
    assert np.array(vocabulary - 1).astype(kind) == vocabulary - 1


@pytest.mark.parametrize("sizes", [[10], [4, 4, 2], [1] * 10, [7, 3]])
@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_rows_are_those_of_the_joined_shards_in_the_order_asked_for(
    tmp_path: Path, sizes: list[int], kind: str
) -> None:
    blocks, rows = write(tmp_path, sizes, kind=kind)
    assert len(blocks) == 10
    for wanted in ([9, 0, 9], range(10), [3], [4], []):
        taken = blocks.take(np.array(wanted, dtype=np.int64))
        assert taken.dtype == np.int64
        assert (taken == rows[list(wanted)]).all()


def test_more_shards_than_are_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_SHARDS", 3)
    blocks, rows = write(tmp_path, [1] * 10)
    wanted = np.random.default_rng(1).integers(0, 10, 200)
    assert (blocks.take(wanted) == rows[wanted]).all()


@pytest.mark.parametrize("row", [-1, 10])
@pytest.mark.parametrize("sizes", [[10], [4, 6]])
def test_a_row_that_is_not_there_is_an_error(tmp_path: Path, sizes: list[int], row: int) -> None:
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        write(tmp_path, sizes)[0].take(np.array([0, row]))


def test_blocks_survive_pickling_as_a_description(tmp_path: Path) -> None:
    blocks, rows = write(tmp_path, [4, 4, 2], length=1000)
    blocks.take(np.array([3]))
    content = pickle.dumps(blocks)
    assert len(content) < 1000
    assert (pickle.loads(content).take(np.array([3, 9])) == rows[[3, 9]]).all()


@pytest.mark.parametrize("size", [0, 7, 40])
def test_a_shard_of_the_wrong_size_is_named_with_both_sizes_and_what_to_do(tmp_path: Path, size: int) -> None:
    blocks, _ = write(tmp_path, [4, 4, 2])
    (tmp_path / "train-00001.bin").write_bytes(b"\0" * size)
    blocks.take(np.array([0, 9]))  # the others are whole
    message = rf"{tmp_path}/train-00001.bin: {size} bytes, but it was written with 32\.(?s:.*)mlmclm data"
    with pytest.raises(UserError, match=message):
        blocks.take(np.array([5]))
    assert blocks.damaged() == {"train-00001.bin": f"{size} bytes, but it was written with 32"}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    blocks, _ = write(tmp_path, [4, 4, 2])
    (tmp_path / "train-00002.bin").unlink()
    assert blocks.damaged() == {"train-00002.bin": "no such file"}
    with pytest.raises(UserError, match=r"train-00002\.bin: no such file"):
        blocks.take(np.array([9]))
