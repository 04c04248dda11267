"""Bytes, requests and seconds of a large run on an object store, on paper:  python -m benchmarks.scale [--write]

States and shards of `1b` at 100 B tokens on 64 GPUs; --write for RESULTS.md.

Counts come from the code that makes and reads the files: shapes of models, sizes of shards, the order of the data. Tests compare
them with the bytes and requests that an S3 server has seen. Seconds are counts divided by the stated speeds of a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.results import write_section
from mlmclm.corpora.blocks import sealed_size, token_type
from mlmclm.corpora.chunks import FRAME
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.filling import CHARACTERS_A_TOKEN
from mlmclm.corpora.order import sample_rows
from mlmclm.corpora.read_ahead import STEPS_AHEAD
from mlmclm.models.architectures import ARCHITECTURES, with_values
from mlmclm.models.build import model_config
from mlmclm.models.sizes import PUBLISHED_VOCABULARY, SIZES, parameters, training_flops
from mlmclm.plans.devices import DEFAULT_UTILISATION, DEVICES
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.parts import PART_BYTES, names_by_part, owner

Tokens = NDArray[np.int64]
"""Numbers of rows, or of tokens in a corpus."""
PAGE = 1000
"""Maximum number of names in S3's answer to a listing."""
LATENCY = 0.05
"""Seconds until S3 answers (`read_ahead.STEPS_AHEAD` says the same)."""
STREAM, NODE = 90e6, 3e9
"""Bytes a second of one connection (AWS's design guidelines for S3: 85 to 90 MB/s), and of a node with 25 Gbit/s."""
PART = 50 << 20
"""Bytes of a part that s3fs reads at once (`S3FileSystem.default_block_size`)."""
TOGETHER = 10
"""Parts that s3fs sends or reads side by side (`S3FileSystem.max_concurrency`)."""
GPUS_A_NODE = 8
DOCUMENT = 700
"""Tokens of a web document, EOS included: an assumption; here all documents have this length."""
FIRST = 100
"""Number of steps at the beginning that the table shows."""


class Transfer(NamedTuple):
    """Traffic of a node with a store."""

    bytes: int
    requests: int

    def __add__(self, other: tuple[int, ...]) -> Transfer:  # type: ignore[override]
        return Transfer(self.bytes + other[0], self.requests + other[1])


def trained(size: str, vocabulary: int) -> int:
    """Parameters of a model as it is trained: with EuroBERT's own LM head, or ModernBERT's layer before a tied one."""
    shape = SIZES[size]
    head = (
        vocabulary * shape.hidden
        if shape.architecture == "eurobert"
        else shape.hidden * (shape.hidden + 1) + vocabulary
    )
    return parameters(shape, vocabulary) + head


def shares_of_state(size: str, vocabulary: int, workers: int) -> list[list[int]]:
    """Return the sizes of the parts of a state that each worker writes."""
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"-": 0}, "-")), mask_token="-")
    with torch.device("meta"):
        model = ARCHITECTURES[SIZES[size].architecture].model(
            with_values(model_config(size, empty, 2048), vocab_size=vocabulary)
        )
    sizes = {f"{kind}/{name}": 4 * tensor.numel() for kind in "mvw" for name, tensor in model.named_parameters()}
    parts = names_by_part(sizes, PART_BYTES)
    shares: list[list[int]] = [[] for _ in range(workers)]
    for number, names in enumerate(parts):
        shares[owner(number, len(parts), workers)].append(sum(sizes[name] for name in names))
    return shares


def worker_bytes(count: int, stage: int, workers: int) -> float:
    """Bytes of `count` parameters' weights (4 each), gradients (4) and moments (8) on a worker (ZeRO, arXiv 1910.02054)."""
    shared = (stage >= 3, stage >= 2, stage >= 1)
    return sum(width * count / (workers if split else 1) for width, split in zip((4, 4, 8), shared, strict=True))


def upload_requests(size: int) -> int:
    """Requests of s3fs for a file of `size` bytes: one, or for a large one those of its parts, a beginning and an end."""
    from s3fs.core import calculate_chunksize

    part = calculate_chunksize(size)
    return 1 if size < 2 * part else -(-size // part) + 2


def uploaded(files: Sequence[int]) -> Transfer:
    """Return the traffic of uploading a worker's files of these sizes.

    Before them s3fs needs three requests to find that the folder does not exist yet.
    """
    return Transfer(sum(files), 3 + sum(map(upload_requests, files)))


def sent(files: Sequence[int], manifest: int = 0) -> Transfer:
    """Return the traffic of sending a folder of files of these sizes: the files, and the manifest last."""
    return uploaded(files) + Transfer(manifest, 1)


def brought(files: Sequence[int], manifest: int = 0, part: int = PART) -> Transfer:
    """Return the traffic of fetching such a folder: the manifest, and each file; for a large file its size, then its parts."""
    requests = (1 if size <= part else 1 + -(-size // part) for size in files)
    return Transfer(sum(files) + manifest, 1 + sum(requests))


@dataclass(frozen=True)
class StoredTokens:
    """The counts of a corpus at an address."""

    blocks: int
    length: int
    vocabulary: int
    shard_blocks: int
    documents: int
    """Documents that end in the blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.length * token_type(self.vocabulary).itemsize

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.blocks // self.shard_blocks)

    @property
    def total(self) -> Transfer:
        """Bytes of the finished corpus, and the requests that uploaded it.

        A shard takes requests for itself, its checksums, its ends of documents, and its record, which is removed later.
        """
        full, rest = divmod(self.blocks, self.shard_blocks)
        beside = sealed_size(self.blocks) + sealed_size(self.documents) + 2 * (self.shards - 1) * sealed_size(0)
        puts = full * upload_requests(self.shard_blocks * self.block_bytes)
        puts += upload_requests(rest * self.block_bytes) if rest else 0
        return Transfer(self.blocks * self.block_bytes + beside, puts + 4 * self.shards)

    def read(self, first: Tokens, end: Tokens, *, chunks: bool = False) -> tuple[Transfer, int]:
        """Return a node's traffic for rows from the tokens `first` to `end` of the corpus (int64 [n]), and the number of shards it reads.

        Rows are read with the stored blocks in which they lie, a request for each shard. Checksums are read once a shard, and
        ends of documents for chunks.
        """
        blocks = (end - 1) // self.length - first // self.length + 1
        begin, stop = (tokens // self.length // self.shard_blocks for tokens in (first, end - 1))
        seen = np.unique(np.concatenate((begin, stop)))
        last = self.blocks - (self.shards - 1) * self.shard_blocks
        beside = sum(sealed_size(last if shard == self.shards - 1 else self.shard_blocks) for shard in seen.tolist())
        if chunks:
            beside += len(seen) * sealed_size(0) + 4 * (self.documents * len(seen) // self.shards)
        requests = int((stop - begin + 1).sum()) + len(seen) * (2 if chunks else 1)
        return Transfer(int(blocks.sum()) * self.block_bytes + beside, requests), len(seen)


def rows_of_node(number: int, steps: range, batch: int, workers: Sequence[range | slice], seed: int = 0) -> Tokens:
    """Return the rows that a node reads in some steps, of a corpus of so many rows, int64 [n].

    Args:
        batch: rows of a step.
        workers: the rows of the batch that each of the node's workers reads.
    """
    rows = sample_rows(number, range(steps.start * batch, steps.stop * batch), seed).reshape(len(steps), batch)
    return np.concatenate([rows[:, part] for part in map(_slice, workers)], axis=1).ravel()


def chunks_on_paper(tokens: int, length: int) -> tuple[int, Callable[[Tokens], tuple[Tokens, Tokens]]]:
    """Return the number of chunks in documents of `DOCUMENT` tokens each, and a function from chunks to their first tokens and ends."""
    room = length - FRAME
    chunks = -(-(DOCUMENT - 1) // room)

    def places(rows: Tokens) -> tuple[Tokens, Tokens]:
        first = rows // chunks * DOCUMENT + rows % chunks * room
        return first, np.minimum(first + room, (rows // chunks + 1) * DOCUMENT)

    return tokens // DOCUMENT * chunks, places


def _slice(rows: range | slice) -> slice:
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


def shares(batch: int, workers: int) -> list[range]:
    """Return the rows of a batch that each worker reads."""
    parts = np.array_split(np.arange(batch), workers)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts]


def gib(count: float) -> str:
    """Format bytes."""
    return f"{count / 2**30:,.1f}" if count < 2**40 else f"{count / 2**30:,.0f}"


def states_and_shards(size: str, tokens: float, workers: int) -> Iterator[str]:
    """Lines of the tables."""
    from mlmclm.corpora.prepare_corpus import blocks_a_shard

    recipe, corpus, shape = Recipe(), CorpusConfig(source="-"), SIZES[size]
    vocabulary = PUBLISHED_VOCABULARY[shape.architecture]
    count, batch, length = trained(size, vocabulary), recipe.batch, recipe.block_length
    yield f"{size}: {count / 1e9:.2f} B parameters with LM head at a vocabulary of {vocabulary:,}; {tokens / 1e9:.0f} B tokens; {workers} workers, "
    yield f"{GPUS_A_NODE} a node; batches of {batch:,} blocks of {length:,} tokens (the recipe's defaults). A store that answers after {1000 * LATENCY:.0f} ms,"
    yield f"{STREAM / 1e6:.0f} MB/s a connection, {NODE / 1e9:.0f} GB/s a node."
    yield ""
    yield "| ZeRO | weights, gradients and moments of a worker, GiB |"
    yield "|---|---|"
    for stage in range(4):
        yield f"| {stage} | {gib(worker_bytes(count, stage, workers))} |"
    yield ""
    written = [share for share in shares_of_state(size, vocabulary, workers) if share]
    parts, largest = [part for share in written for part in share], max(written, key=sum)
    # Beside the weights: four small files of a state, which rank 0 sends, and six of an encoder's export.
    state, export = [*parts, *[0] * 4], [4 * count, *[0] * 6]
    whole_state = sent([*written[0], *[0] * 4])
    for share in written[1:]:
        whole_state += uploaded(share)
    yield f"A state has {len(parts)} parts. {len(written)} workers write them, each at most {gib(sum(largest))} GiB, which it holds in its host's memory."
    yield ""
    yield "| what is sent or fetched | GiB | requests | s over one connection | s over ten |"
    yield "|---|---|---|---|---|"
    for title, transfer, alone in (
        ("a state or checkpoint sent, its workers side by side", whole_state, sum(largest) / STREAM),
        ("a state fetched by a node", brought(state), whole_state.bytes / STREAM),
        ("an export sent by a node", sent(export), 4 * count / STREAM),
    ):
        yield f"| {title} | {gib(transfer.bytes)} | {transfer.requests:,} | {alone:,.0f} | {alone / TOGETHER:,.0f} |"
    blocks = int(tokens) // length
    a_shard = blocks_a_shard(corpus, length * token_type(vocabulary).itemsize)
    stored = StoredTokens(blocks, length, vocabulary, a_shard, blocks * length // DOCUMENT)
    rows = shares(batch, workers)[:GPUS_A_NODE]
    joined = length * rows_of_node(blocks, range(FIRST), batch, rows)
    first, touched = stored.read(joined, joined + length)
    number, places = chunks_on_paper(blocks * length, length)
    chunks, also_touched = stored.read(*places(rows_of_node(number, range(FIRST), batch, rows)), chunks=True)
    flops = training_flops(
        shape, tokens=batch * length, labelled=batch * length, length=length, vocabulary=vocabulary, causal=True
    )
    step = flops / (workers * DEVICES["h100"].peak * DEFAULT_UTILISATION)
    hourly = 3600 / step
    node_rows = len(rows) * len(rows[0])
    pages = -(-3 * stored.shards // PAGE)
    whole_shards = touched * stored.shard_blocks * stored.block_bytes
    yield ""
    yield f"A step takes {step:.2f} s on H100s at {DEFAULT_UTILISATION:.0%} of their peak, the whole run {blocks / batch * step / 86400:.1f} days."
    yield ""
    yield "| the shards | |"
    yield "|---|---|"
    yield f"| shards, objects | {stored.shards:,}, {3 * stored.shards + 1:,} |"
    yield f"| GiB | {gib(stored.total.bytes)} |"
    yield f"| requests that write them, one after the other | {stored.total.requests:,} |"
    yield f"| hours of these uploads | {(stored.total.requests * LATENCY + stored.total.bytes / STREAM) / 3600:.1f} |"
    yield f"| GB of text in memory, if `max_tokens` chooses documents by hash | {tokens * CHARACTERS_A_TOKEN / 1e9:,.0f} |"
    yield f"| a listing: requests, s | {pages}, {pages * LATENCY:.1f} |"
    yield f"| a node's first {FIRST} steps, block by block: GiB, requests | {first.bytes / 2**30:.2f}, {first.requests:,} |"
    yield f"| of which checksums of blocks: shards, GiB | {touched:,}, {touched * sealed_size(stored.shard_blocks) / 2**30:.2f} |"
    yield f"| the same with `rows: chunks`, of documents of {DOCUMENT} tokens: GiB, requests | {chunks.bytes / 2**30:.2f}, {chunks.requests:,} |"
    yield f"| of which ends of documents: shards, GiB | {also_touched:,}, {4 * stored.documents * also_touched / stored.shards / 2**30:.2f} |"
    yield f"| the same, if whole shards were copied: GiB, s at the node's speed | {gib(whole_shards)}, {whole_shards / NODE:,.0f} |"
    yield f"| a node in an hour: steps, GiB, requests | {hourly:,.0f}, {gib(hourly * node_rows * stored.block_bytes)}, {hourly * node_rows:,.0f} |"
    yield f"| all nodes, requests a second (S3 answers 5,500 a second and prefix) | {batch / step:,.0f} |"
    yield f"| steps read ahead, and how long the store may take for one, s | {STEPS_AHEAD}, {STEPS_AHEAD * step:.1f} |"


def main(
    size: Annotated[str, typer.Option(help="Size of the model.")] = "1b",
    tokens: Annotated[float, typer.Option(help="Tokens of the corpus.")] = 100e9,
    workers: Annotated[int, typer.Option(help="Workers of pretraining, one a GPU.")] = 64,
    write: Annotated[bool, typer.Option("--write", help="Write the tables to benchmarks/RESULTS.md.")] = False,
) -> None:
    """Print the tables, or write them."""
    title = f"Scale: {size} on {tokens / 1e9:.0f} B tokens"
    lines = ["Command: `python -m benchmarks.scale`. Counts on paper, no measurement.", ""]
    lines += states_and_shards(size, tokens, workers)
    if write:
        write_section(title, lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
