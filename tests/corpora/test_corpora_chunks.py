"""Chunks of documents, read from shards of a joined stream."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from mlmclm.corpora import chunks as module
from mlmclm.corpora.blocks import Blocks, Shard
from mlmclm.corpora.chunks import Chunks, chunk_table, without_filling
from mlmclm.corpora.mixed_blocks import MixedBlocks, rows_of_length
from mlmclm.corpora.shelf import Shelf
from mlmclm.corpora.tokenizer import SpecialTokens, save
from mlmclm.errors import UserError
from mlmclm.storage.files import hash_file
from small_models import small_tokenizer

BOS, EOS = 1, 2


def documents(number: int, seed: int = 0) -> list[list[int]]:
    """Documents of 0 to 60 tokens."""
    chance = random.Random(seed)
    return [[chance.randint(10, 999) for _ in range(chance.choice([0, 1, 5, 6, 7, 12, 60]))] for _ in range(number)]


def write(folder: Path, tokens: list[int], shard_blocks: int, length: int = 8) -> Blocks:
    """The whole blocks of a stream of tokens, in shards of so many."""
    whole = np.array(tokens[: len(tokens) // length * length], dtype="<u2").reshape(-1, length)
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number, start in enumerate(range(0, len(whole), shard_blocks)):
        part = whole[start : start + shard_blocks]
        file = folder / f"train-{number:05d}.bin"
        part.tofile(file)
        shards.append(Shard(file.name, len(part), hash_file(file)))
    return Blocks(Shelf(str(folder)), shards, length, "<u2")


def plain(tokens: list[int], length: int) -> list[list[int]]:
    """The chunks of a stream of tokens, by a loop over its documents."""
    rows, document = [], list[int]()
    for token in [*tokens, EOS]:
        if token != EOS:
            document.append(token)
            continue
        for start in range(0, len(document), length - 2):
            row = [BOS, *document[start : start + length - 2], EOS]
            rows.append(row + [EOS] * (length - len(row)))
        document = []
    return rows


@pytest.mark.parametrize("length", [8, 9, 16, 61, 62, 100])
@pytest.mark.parametrize("shard_blocks", [1, 2, 5, 1000])
def test_chunks_are_those_of_a_loop_over_the_documents_however_they_are_stored(
    tmp_path: Path, length: int, shard_blocks: int
) -> None:
    tokens = [token for document in documents(80) for token in [*document, EOS]]
    blocks = write(tmp_path, tokens, shard_blocks)
    stored = tokens[: len(blocks) * 8]
    wanted = np.array(plain(stored, length))
    made = Chunks(blocks, length, chunk_table(blocks, length, EOS), BOS, EOS)
    assert len(made) == len(wanted) > 20
    order = np.random.default_rng(0).permutation(len(wanted))
    assert np.array_equal(made.take(order), wanted[order])
    again = pickle.loads(pickle.dumps(made))
    assert np.array_equal(again.take(np.arange(len(again))), wanted)
    own = [row[: row.index(EOS) + 1] for row in wanted.tolist()]
    assert made.table.tokens == sum(map(len, own))
    flat, labels = without_filling(wanted, wanted + 1, EOS)
    assert flat.tolist() == [[token for row in own for token in row]] and np.array_equal(labels, flat + 1)


def test_chunks_are_counted_once_and_a_damaged_count_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = write(tmp_path, [5, 6, EOS, *range(10, 31)], 1)
    made = chunk_table(blocks, 8, EOS)
    assert made == ((2, 2, 1), (0, 5, 1), 2 + 21 + 2 * 5)
    monkeypatch.setattr(Blocks, "tokens", None)  # reads nothing
    assert chunk_table(blocks, 8, EOS) == made
    (file,) = tmp_path.glob("chunks-*.json")
    file.write_text(file.read_text().replace(str(made.tokens), str(made.tokens + 1)))
    with pytest.raises(UserError, match=f"Delete {file}"):
        chunk_table(blocks, 8, EOS)


def test_places_that_are_forgotten_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    tokens = [token for document in documents(30) for token in [*document, EOS]]
    blocks = write(tmp_path, tokens, 2)
    made = Chunks(blocks, 10, chunk_table(blocks, 10, EOS), BOS, EOS)
    rows = np.random.default_rng(0).integers(0, len(made), 200)
    assert np.array_equal(made.take(rows), np.array(plain(tokens[: len(blocks) * 8], 10))[rows])
    for wrong in (-1, len(made)):
        with pytest.raises(IndexError):
            made.take(np.array([wrong]))


def test_rows_of_a_mix_are_chunks_of_each_source_and_one_token_for_both_ends_is_refused(tmp_path: Path) -> None:
    tokenizer = small_tokenizer().backend_tokenizer
    save(tokenizer, SpecialTokens("<pad>", "<bos>", "<eos>", "<mask>"), tmp_path)
    end = tokenizer.token_to_id("<eos>")
    streams = {name: [20 + number, 30, end, *range(40, 60)] * 4 for number, name in enumerate("ab")}
    mixed = MixedBlocks({name: write(tmp_path / name, stream, 3) for name, stream in streams.items()})
    rows = rows_of_length(mixed, 12, "chunks", tmp_path)
    assert isinstance(rows, MixedBlocks) and rows.block_length == 12
    parts = [each.take(np.arange(len(each))) for each in rows.sources.values()]
    assert np.array_equal(rows.take(np.arange(len(rows))), np.concatenate(parts))
    assert {int(row[0]) for row in parts[0]} == {tokenizer.token_to_id("<bos>")}
    save(tokenizer, SpecialTokens("<pad>", "<eos>", "<eos>", "<mask>"), tmp_path)
    with pytest.raises(UserError, match=r"one token for both .* rows: joined"):
        rows_of_length(mixed, 12, "chunks", tmp_path)
