"""Packing documents into blocks, and reading them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from mlmclm.corpora.blocks import Blocks, BlockWriter, token_type
from mlmclm.errors import UserError


def write(
    path: Path, documents: list[np.ndarray], length: int, vocabulary: int, limit: int | None = None
) -> BlockWriter:
    with BlockWriter(path, length, token_type(vocabulary), limit) as writer:
        for document in documents:
            writer.add(document)
    return writer


@pytest.mark.parametrize(("vocabulary", "kind"), [(65_536, "<u2"), (65_537, "<u4")])
def test_packing_is_the_joined_documents_cut_into_blocks(tmp_path: Path, vocabulary: int, kind: str) -> None:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, vocabulary, size=n) for n in generator.integers(1, 60, size=100)]
    writer = write(tmp_path / "x.bin", documents, 16, vocabulary)
    stream = np.concatenate(documents)
    blocks = Blocks(tmp_path / "x.bin", 16, kind)
    assert len(blocks) == writer.blocks == len(stream) // 16
    assert (blocks.take(np.arange(len(blocks))).ravel() == stream[: len(blocks) * 16]).all()
    assert writer.documents == 100


def test_taking_rows_gives_int64_in_the_order_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "x.bin", [np.arange(40)], 4, 100)
    taken = Blocks(tmp_path / "x.bin", 4, "<u2").take(np.array([9, 0, 9]))
    assert taken.dtype == np.int64
    assert taken.tolist() == [[36, 37, 38, 39], [0, 1, 2, 3], [36, 37, 38, 39]]


def test_the_limit_is_rounded_down_to_blocks_and_cuts_inside_a_document(tmp_path: Path) -> None:
    writer = write(tmp_path / "x.bin", [np.arange(7), np.arange(30), np.arange(5)], 4, 100, limit=15)
    assert writer.full
    assert writer.tokens == 12
    assert writer.documents == 2
    assert len(Blocks(tmp_path / "x.bin", 4, "<u2")) == 3


def test_blocks_survive_pickling(tmp_path: Path) -> None:
    write(tmp_path / "x.bin", [np.arange(40)], 4, 100)
    blocks = Blocks(tmp_path / "x.bin", 4, "<u2")
    content = pickle.dumps(blocks)
    assert len(content) < 1000
    assert (pickle.loads(content).take(np.array([3])) == blocks.take(np.array([3]))).all()


@pytest.mark.parametrize("size", [0, 7])
def test_a_truncated_file_is_an_error_that_says_what_to_delete(tmp_path: Path, size: int) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0" * size)
    with pytest.raises(UserError, match="not a whole number of blocks") as error:
        Blocks(tmp_path / "x.bin", 4, "<u2")
    assert f"Delete the folder {tmp_path}" in str(error.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Blocks(tmp_path / "x.bin", 4, "<u2")
