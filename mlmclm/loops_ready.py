"""Compiles the loops that models of some shape need, once on a machine and before any clock starts.

It is done in a process of its own, `python -m mlmclm.loops_ready JSON`, while others that need the same wait: a fault of LLVM, or an
instruction that the CPU doesn't have, ends that process and not the caller's. A note beside the compiled code says how it went, so
that it is tried once; where it failed the caller computes with torch's operations, and says so. What has nothing to do with the
loops and the CPU (a full disk, a signal from outside) is not noted.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.errors import EnvironmentFault
from mlmclm.models.sizes import Size
from mlmclm.storage.files import stable_hash, write_atomic

if TYPE_CHECKING:
    from mlmclm.plans.recipe import Recipe

FUSED = ("eurobert", "llama")
"""Model types that the CPU computes in this project's block."""
READY = "ready"
COMMAND = ["-P", "-m", "mlmclm.loops_ready"]


@dataclass(frozen=True)
class Shape:
    """A shape of model that loops are compiled for."""

    heads: int
    key_heads: int
    width: int
    """The dropout of a head."""
    fused: bool
    dropout: bool
    """In attention."""
    weights: str
    """torch's name of their type; likewise that of products."""
    products: str

    @staticmethod
    def of_size(size: Size, recipe: Recipe) -> Shape:
        """Return the shape of pretraining, which has no dropout."""
        return Shape(
            heads=size.heads,
            key_heads=size.key_value_heads,
            width=size.head_width or size.hidden // size.heads,
            fused=size.architecture in FUSED and not (recipe.compile or recipe.activation_checkpointing),
            dropout=False,
            **_types(recipe.precision),
        )

    @staticmethod
    def of_folder(folder: Path, precision: str) -> Shape | None:
        """Return the shape of fine-tuning a model's folder at a protocol's precision; None where its config.json doesn't say it."""
        try:
            config = json.loads((folder / "config.json").read_bytes())
            heads = config["num_attention_heads"]
            return Shape(
                heads=heads,
                key_heads=config.get("num_key_value_heads") or heads,
                width=config.get("head_dim") or config["hidden_size"] // heads,
                fused=config["model_type"] in FUSED,
                dropout=bool(config.get("attention_probs_dropout_prob", config.get("attention_dropout"))),
                **_types(precision),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None  # what is wrong with it is said by what reads the model


def _types(precision: str) -> dict[str, str]:
    return {
        "weights": "bfloat16" if precision == "bf16" else "float32",
        "products": "float32" if precision == "fp32" else "bfloat16",
    }


def prepare(shapes: Iterable[Shape | None], announce: Callable[[str], None]) -> None:
    """Has the loops for these shapes compiled where they aren't yet; where that fails, this process computes with torch's
    operations from now on (`loops.give_up`).

    Args:
        announce: gets a line for the person who waits, if there is something to compile, and one if it fails.
    """
    from mlmclm.models import loops  # numba takes its time, and is not needed where there is nothing to compute

    wanted, folder = sorted({shape for shape in shapes if shape is not None}, key=str), loops.cache_folder()
    if not wanted or not loops.usable():
        return
    if folder is None:
        announce(
            "compiling loops for this CPU at each start: no folder to keep them in can be written to (set NUMBA_CACHE_DIR)"
        )
        try:
            compile_all(wanted)
        except Exception as error:  # whatever numba and LLVM raise
            _give_up(f"{type(error).__name__}: {error}", None, announce)
        return
    notes = {shape: folder / f"{stable_hash(asdict(shape))[:20]}.txt" for shape in wanted}
    if not all(note.is_file() for note in notes.values()):
        with _alone(folder, announce):
            missing = [shape for shape, note in notes.items() if not note.is_file()]  # others may just have done it
            if missing:
                announce(f"compiling loops for this CPU, once on this machine (kept in {folder})")
                result, lasting = _compile_apart(missing)
                for shape in missing if lasting else ():
                    with suppress(EnvironmentFault):
                        write_atomic(notes[shape], result)
                if result != READY:
                    _give_up(result, notes[missing[0]] if lasting else None, announce)
                    return
    for note in notes.values():
        result = note.read_text(encoding="utf-8") if note.is_file() else READY
        if result != READY:
            _give_up(result, note, announce)
            return


def _give_up(reason: str, note: Path | None, announce: Callable[[str], None]) -> None:
    from mlmclm.models import loops

    again = f" Delete {note} to try again." if note is not None else ""
    announce(
        f"loops cannot be compiled for this CPU ({reason}): torch's operations are taken, which are slower.{again}"
    )
    loops.give_up()


def _compile_apart(shapes: list[Shape]) -> tuple[str, bool]:
    """`READY`, or what went wrong; and whether it would come again: not if the process was killed from outside, or met a full
    disk, too little memory or a broken installation."""
    here = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *COMMAND, json.dumps([asdict(shape) for shape in shapes])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return READY, True
    lines = done.stderr.strip().splitlines()
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    outside = done.returncode in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, os.EX_TEMPFAIL)
    return (f"{how}: {lines[-1]}" if lines else how), not outside


@contextmanager
def _alone(folder: Path, announce: Callable[[str], None]) -> Iterator[None]:
    """One process at a time, of those that can lock files there; a line says that another one is waited for."""
    with (folder / ".lock").open("w") as lock:
        with suppress(OSError):  # a file system without locks: the same is compiled twice at worst
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                announce("waiting for another process, which compiles loops for this CPU")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_all(shapes: Iterable[Shape]) -> None:
    """Computes a little of everything with models of these shapes, in this process."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            for shape in shapes:
                _compute(shape)
    finally:
        torch.set_num_threads(threads)


def _compute(shape: Shape) -> None:
    """Passes of a small model with attention of this shape, its loss, and steps of the optimizer of fine-tuning."""
    import torch
    from torch import nn
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    from mlmclm.finetuning.optimizer import optimizer_for
    from mlmclm.finetuning.protocol import Protocol
    from mlmclm.models.build import PretrainingModel
    from mlmclm.models.encoder import encode
    from mlmclm.models.packing import Packing

    config = EuroBertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads, head_dim=shape.width, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, mask_token_id=3, attention_dropout=0.1 * shape.dropout, tie_word_embeddings=False,
    )  # fmt: skip
    model = EuroBertForMaskedLM(config).to(getattr(torch, shape.weights))
    apart = shape.products != shape.weights
    pretraining = PretrainingModel(model, precision="bf16-autocast" if apart else "fp32")
    pretraining.fused = shape.fused
    packing, ids = Packing.of([40, 24]), torch.arange(64)[None]
    labels = torch.where(ids % 3 == 0, ids, -100)
    for training in (True, False):
        model.train(training)
        for causal in (True, False):
            pretraining(ids, labels, causal, packing).backward()
    if shape.weights == "float32":
        model.zero_grad()
        head = nn.Linear(32, 2)
        optimizer = optimizer_for(model.base_model, head, Protocol(), 1e-3, 2)
        row = nn.functional.pad(ids, (0, packing.padded_tokens - packing.tokens))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=apart):
                head(encode(model.base_model, row, packing, causal=False, fused=shape.fused)).float().sum().backward()
            optimizer.norm()
            optimizer.step(1e-3, 1.0)
        optimizer.finish()


def main() -> None:
    """Compiles for the shapes of the command line; ends with `EX_TEMPFAIL` where it is not the loops or the CPU that fail."""
    try:
        compile_all([Shape(**shape) for shape in json.loads(sys.argv[1])])
    except (OSError, MemoryError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)


if __name__ == "__main__":
    main()
