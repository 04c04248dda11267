"""A process that runs a stage or a cell, writes which files it opened, and runs it again with each of them changed.

    python opened_files.py FOLDER KIND...

Python's audit hook sees what Python opens. The libraries in Rust and C++ (safetensors, tokenizers, Arrow) don't ask Python:
what they open of the folder is seen by inotify.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

Run = Callable[[], Any]
IN_OPEN, IN_Q_OVERFLOW, IN_ISDIR = 0x20, 0x4000, 0x40000000


@contextmanager
def watched(root: Path) -> Iterator[set[str]]:
    """Collect the real paths of all files that this process opens, and of all files below a folder that anything opens."""
    opened: set[str] = set()
    active = [True]

    def hook(event: str, arguments: Any) -> None:
        if active[0] and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            opened.add(os.path.realpath(os.fsdecode(arguments[0])))

    library = ctypes.CDLL(None, use_errno=True)
    handle = library.inotify_init1(os.O_CLOEXEC)
    assert handle >= 0, os.strerror(ctypes.get_errno())
    folders = {}
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        watch = library.inotify_add_watch(handle, os.fsencode(folder), IN_OPEN)
        assert watch >= 0, os.strerror(ctypes.get_errno())
        folders[watch] = folder
    end = root / "watch-ends"
    end.touch()

    def drain() -> None:
        while True:
            events = os.read(handle, 1 << 16)
            while events:
                watch, mask, _, length = struct.unpack_from("iIII", events)
                name = events[16 : 16 + length].rstrip(b"\0").decode()
                events = events[16 + length :]
                assert not mask & IN_Q_OVERFLOW
                if name == end.name:
                    return
                if not mask & IN_ISDIR:
                    opened.add(os.path.realpath(folders[watch] / name))

    thread = threading.Thread(target=drain)
    thread.start()
    sys.addaudithook(hook)  # for good: hooks cannot be removed
    try:
        yield opened
    finally:
        active[0] = False
        end.read_bytes()
        thread.join()
        os.close(handle)
        end.unlink()


def cell(folder: Path, *, starts: bool = False) -> Run:
    """Return the run of a cell of a given model, or of one that starts from another cell's encoder."""
    from mlmclm.finetuning.cell import Cell, Start, cell_key
    from mlmclm.finetuning.kept import KeptEncoder
    from mlmclm.finetuning.protocol import Protocol
    from mlmclm.finetuning.run import keep_encoder, run_cell
    from mlmclm.models.folder import weights_hash
    from mlmclm.tasks.prepare_task import prepare_task
    from small_models import write_two

    write_two(folder)
    (folder / "model" / "README.md").write_text("a card")
    store, protocol = folder / "store", Protocol(max_steps=2, batch_size=8, max_length=48, max_evaluation_examples=8)
    task = prepare_task("sst2", folder / "model", protocol, store, folder / "data")
    trained = Cell("m", folder / "model", weights_hash(folder / "model"), "sst2", task.task_data, protocol, 1e-3, 0)
    if starts:
        make = partial(keep_encoder, trained, store=store, data_root=folder / "data")
        KeptEncoder(store, cell_key(trained)).ensure(make)
        trained = replace(trained, start=Start(cell_key(trained), "sst2"), seed=1)
    return lambda: run_cell(trained, store=store, data_root=folder / "data")["scores"]


def stage(folder: Path, *, number: int) -> Run:
    """Return the run of a study's first stage, from a given model, or of the second, from the first one's last state."""
    import torch.distributed as distributed
    import yaml

    from mlmclm.pretraining import states
    from mlmclm.pretraining.job import StageJob
    from mlmclm.pretraining.worker import train_stage
    from mlmclm.storage.files import hash_file
    from mlmclm.storage.place import Place
    from mlmclm.studies.prepare import prepare_study
    from mlmclm.studies.study_file import load_study
    from small_models import save_small_decoder
    from small_study import write_study

    class Here:
        """The launcher of a single worker."""

        def agreed(self, value: Any) -> Any:
            return value

        def apart(self, function: Callable[..., None], *arguments: Any) -> None:
            function(*arguments)

        def report(self, step: int) -> None:
            return

        def keep(self, step: int, write: Callable[[Path], None]) -> None:
            write(folder / "kept" / str(step))

        def show(self, name: str, value: float, labels: Any) -> None:
            return

    recipe = {
        "block_length": 32, "batch": 4, "peak_learning_rate": 3e-3, "warmup_steps": 1, "decay_steps": 1, "checkpoint_every": 9,
        "evaluate_every": 2, "evaluation_blocks": 4, "workers": 1,
    }  # fmt: skip
    initial = {"tiny": str(save_small_decoder(folder / "decoder"))}
    path = write_study(folder, initial=initial, models=["tiny-clm-2-mlm40-4"], baseline=None, recipe=recipe)
    path.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(path.read_text()).items() if k != "tokenizer"}))
    prepared = prepare_study(load_study(path), Place(folder / "store", folder / "data"))
    store, corpus = prepared.place.store, prepared.corpus
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")  # DeepSpeed reads them
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/group", rank=0, world_size=1)

    def train(stage: Any) -> str:
        (folder / "run").mkdir()
        job = StageJob(
            stage=stage, shape=prepared.initial["tiny"].size, store=store, run_folder=folder / "run", corpus=corpus.key,
            train=pickle.loads(pickle.dumps(corpus.train)), validation=pickle.loads(pickle.dumps(corpus.validation)),
            tokenizer=corpus.tokenizer, whole_recipe=prepared.study.recipe, fingerprint=prepared.fingerprint, device="cpu",
        )  # fmt: skip
        (key,) = job.deposits.values()
        left = states.state_folder(store, key)
        try:
            train_stage(job, Here())
            return hash_file(left / "state.safetensors")
        finally:
            for place in (folder / "run", folder / "kept", *([left] if stage is prepared.plan.stages[number] else [])):
                shutil.rmtree(place, ignore_errors=True)

    for before in prepared.plan.stages[:number]:
        train(before)
    return partial(train, prepared.plan.stages[number])


KINDS: dict[str, Callable[[Path], Run]] = {
    "cell": cell,
    "a cell that starts from another": partial(cell, starts=True),
    "the first stage": partial(stage, number=0),
    "the next stage": partial(stage, number=1),
}


def look(kind: str, root: Path) -> None:
    """Print the opened files, and for each file of the folder the outcome of a run after one of its bytes has changed."""
    run = KINDS[kind](root)
    inside = {os.path.realpath(path) for path in root.rglob("*") if path.is_file()}
    kept = shutil.copytree(root, root.with_name(f"{root.name}-kept"), symlinks=True)
    with watched(root) as opened:
        expected = run()
    outcomes = {}
    for path in (Path(name) for name in sorted(opened & inside)):
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else b" ")
        try:
            outcome = "the same" if run() == expected else "something else"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        outcomes[path.relative_to(root).as_posix()] = outcome
        shutil.rmtree(root)
        shutil.copytree(kept, root, symlinks=True)
    assert run() == expected, "the same run gives the same bits"
    elsewhere = sorted(path for path in opened if not path.startswith(f"{root}{os.sep}") and Path(path).is_file())
    print(json.dumps({"elsewhere": elsewhere, "outcomes": outcomes}))


if __name__ == "__main__":
    for number, case in enumerate(sys.argv[2:]):
        look(case, Path(sys.argv[1]).resolve() / str(number))
