"""Compile the loops that some model shapes need, once per machine and before any clock starts.

This is done in a process of its own, while others that need the same loops wait: a fault of LLVM, or an instruction
that the CPU doesn't have, ends that process and not the caller's. docs/pretraining.md says what is recorded.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from mlmclm.backends.choice import backend_of, give_up
from mlmclm.backends.cpu.loops import cache_folder
from mlmclm.backends.model_shape import ModelShape
from mlmclm.errors import EnvironmentFault
from mlmclm.storage.files import stable_hash, write_atomic

READY = "ready"


def prepare(
    shapes: Sequence[ModelShape],
    announce: Callable[[str], None],
    compute: Callable[[Iterable[ModelShape]], None],
) -> None:
    """Implement `mlmclm.backends.reference.Reference.prepare`; if it fails, `give_up`."""
    folder = cache_folder()
    if folder is None:
        announce(
            "compiling loops for this CPU at each start: no folder to keep them in can be written to (set NUMBA_CACHE_DIR)"
        )
        try:
            compute(shapes)
        except Exception as error:  # whatever numba and LLVM raise
            _give_up(f"{type(error).__name__}: {error}", None, announce)
        return
    backend = backend_of("cpu").name  # `cpu` compiles less than `cpu+amx`
    notes = [folder / f"{stable_hash({**asdict(shape), 'backend': backend})[:20]}.txt" for shape in shapes]
    if not all(note.is_file() for note in notes):
        with _alone(folder, announce):
            # Another process may have compiled some while this one waited for the lock.
            missing = [(shape, note) for shape, note in zip(shapes, notes, strict=True) if not note.is_file()]
            if missing:
                announce(f"compiling loops for this CPU, once on this machine (kept in {folder})")
                result, lasting = _compile_apart([shape for shape, _ in missing], compute.__module__)
                for _, note in missing if lasting else ():
                    # Without a note it is only tried again next time.
                    with suppress(EnvironmentFault):
                        write_atomic(note, result)
                if result != READY:
                    _give_up(result, missing[0][1] if lasting else None, announce)
                    return
    for note in notes:
        result = note.read_text(encoding="utf-8") if note.is_file() else READY
        if result != READY:
            _give_up(result, note, announce)
            return


def _give_up(reason: str, note: Path | None, announce: Callable[[str], None]) -> None:
    again = f" Delete {note} to try again." if note is not None else ""
    announce(
        f"loops cannot be compiled for this CPU ({reason}): torch's operations are taken, which are slower.{again}"
    )
    give_up("cpu")


def _compile_apart(shapes: list[ModelShape], module: str) -> tuple[str, bool]:
    """Compile in a process of its own.

    Returns:
        `READY` or the fault, and whether it would occur again. It would not if the process was killed from outside, or
        met a full disk, too little memory or a broken installation.
    """
    here = str(Path(__file__).parents[3])
    # -P keeps a module in the working directory from shadowing an installed one; PYTHONPATH finds this very package.
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, json.dumps([asdict(shape) for shape in shapes])],
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
    """Let one process at a time in, among those that can lock files there; announce a wait for another one."""
    with (folder / ".lock").open("w") as lock:
        with suppress(OSError):  # no locks on this file system: at worst the same is compiled twice
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                announce("waiting for another process, which compiles loops for this CPU")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
