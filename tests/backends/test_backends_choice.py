"""One backend a device: chosen by name, and the package works without the CPU's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mlmclm
from mlmclm.backends import choice
from mlmclm.backends.choice import backend_of, best_device, device_of_workers, visible
from mlmclm.backends.reference import Reference
from mlmclm.errors import UserError
from mlmclm.registry import KINDS

PACKAGE = Path(mlmclm.__file__).parent
TESTS = Path(__file__).parents[1]

WORK = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as distributed
from mlmclm.backends.choice import backend_of
from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.architectures import weights_of
from mlmclm.models.build import PretrainingModel
from mlmclm.models.folder import weights_hash
from mlmclm.objectives.mlm import Masked
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.checkpoints import fresh
from mlmclm.pretraining.engine import Engine
from mlmclm.pretraining.partitioning import partitioning_of
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_small_model, write_sentiment
from transformers import EuroBertForMaskedLM

folder = Path(sys.argv[1])
torch.set_num_threads(1)
write_sentiment(folder / "data", train=80, test=30)
model_folder = save_small_model(folder / "model")
protocol = Protocol(max_steps=6, max_length=48, batch_size=8, max_evaluation_examples=20)
places = {"store": folder / "store", "data_root": folder / "data"}
data = prepare_task("sst2", model_folder, protocol, **places).task_data
cell = Cell("m", model_folder, weights_hash(model_folder), "sst2", data, protocol, 1e-2, 0)
distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/rendezvous")
recipe = Recipe(batch=4, block_length=32, workers=1, precision="fp32", clip=1.0)
ids = torch.randint(4, 300, (4, 32), generator=torch.Generator().manual_seed(0))
batch = ids, torch.where(ids % 3 == 0, ids, -100)
found = []
for chosen in sys.argv[2:]:
    os.environ["MLMCLM_BACKEND"] = chosen
    result = run_cell(cell, **places)
    model = EuroBertForMaskedLM.from_pretrained(model_folder)
    engine = Engine(PretrainingModel(model, precision="fp32"), recipe, partitioning_of(recipe), fresh(weights_of(model)))
    losses = [float(engine.step([batch], Masked(40), rate=1e-2)[0]) for _ in range(3)]
    found.append([backend_of("cpu").name, result["cost"]["backend"].partition(" ")[0], result["curve"], result["scores"], losses])
print(json.dumps(found))
"""


def work(package: Path, folder: Path, *chosen: str) -> list[Any]:
    """Results for each value of MLMCLM_BACKEND, from one process: it takes longer to start than to compute."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", WORK, str(folder), *chosen], capture_output=True, text=True, timeout=1500, check=False,
        env={**os.environ, "PYTHONPATH": f"{package.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1",
             "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_without_the_cpu_s_own_backend_everything_is_computed_by_torch(tmp_path: Path) -> None:
    """The folder is deleted from a copy of the package; losses are those of the whole package to rounding."""
    bare = tmp_path / "bare" / "mlmclm"
    shutil.copytree(PACKAGE, bare, ignore=shutil.ignore_patterns("__pycache__", "cpu"))
    assert not (bare / "backends" / "cpu").exists()
    ((name, used, curve, scores, losses),) = work(bare, tmp_path / "without", "")
    assert name == used == "reference"
    chosen, (name, used, *own) = work(PACKAGE, tmp_path / "whole", "reference", "")
    assert ["reference", "reference", curve, scores, losses] == chosen
    assert name == used and name.startswith("cpu")
    for found, expected in ((curve, own[0]), (losses, own[2])):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-2, atol=2e-3)


def test_a_backend_that_the_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLMCLM_BACKEND", "referense")
    with pytest.raises(
        UserError, match=r"MLMCLM_BACKEND.*'referense'.*Did you mean 'reference'.*Allowed: .*cpu, reference"
    ):
        backend_of("cpu")


def test_the_name_of_another_device_s_backend_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLMCLM_BACKEND", raising=False)
    own = backend_of("cpu").name
    monkeypatch.setenv("MLMCLM_BACKEND", "cuda")
    assert backend_of("cpu").name == own
    monkeypatch.setenv("MLMCLM_BACKEND", "cpu")
    assert [backend_of("cpu").name, backend_of("cuda").name] == ["cpu", "cuda"]


class Slow(Reference):
    """A backend as somebody else would write it."""

    name = "slow"


def test_a_registered_backend_is_taken_by_its_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_chosen", {})
    usual = type(backend_of("cpu"))
    mlmclm.register("backend", None, Slow)
    try:
        monkeypatch.setattr(choice, "_chosen", {})
        assert type(backend_of("cpu")) is usual
        monkeypatch.setenv("MLMCLM_BACKEND", "slow")
        assert isinstance(backend_of("cpu"), Slow)
        monkeypatch.setattr(Slow, "device", "cuda")
        monkeypatch.setattr(choice, "_chosen", {})
        assert type(backend_of("cpu")) is usual, "one for another kind of device changes nothing"
    finally:
        KINDS["backend"].remove("slow")
    with pytest.raises(UserError, match="backend 'reference'"):
        mlmclm.register("backend", "reference", Reference)


def test_a_backend_that_is_registered_again_is_the_changed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLMCLM_BACKEND", "mine")

    def cell(title: str) -> None:
        """A notebook's cell, run again after a change."""

        @mlmclm.register("backend")
        class Mine(Reference):
            name = "mine"

            def title(self) -> str:
                return title

    try:
        for title in ("before", "after"):
            cell(title)
            assert backend_of("cpu").title() == title
    finally:
        KINDS["backend"].remove("mine")
    with pytest.raises(UserError, match="'mine'"):
        backend_of("cpu")


def test_each_kind_of_device_has_a_reference_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name among the members is another, as names are those of one kind of device's."""
    monkeypatch.delenv("MLMCLM_BACKEND", raising=False)

    class XpuReference(Reference):
        name, device, process_group = "xpu-reference", "xpu", "xccl"

    class Xpu(XpuReference):
        name = "xpu"

    try:
        for member in (Xpu, XpuReference):
            mlmclm.register("backend", None, member)
        for wanted, chosen in (
            ("", XpuReference),
            ("reference", XpuReference),
            ("xpu-reference", XpuReference),
            ("xpu", Xpu),
        ):
            monkeypatch.setenv("MLMCLM_BACKEND", wanted)
            monkeypatch.setattr(choice, "_chosen", {})
            assert type(backend_of("xpu")) is chosen
        choice.give_up("xpu")
        assert type(backend_of("xpu")) is XpuReference
    finally:
        for member in (Xpu, XpuReference):
            KINDS["backend"].remove(member.name)
        choice._given_up.clear()
    monkeypatch.delenv("MLMCLM_BACKEND")
    assert {name: type(each).__name__ for name, each in choice.backends_of("cuda").items()} == {
        "cuda": "Cuda", "reference": "CudaReference",
    }  # fmt: skip
    assert type(choice.backends_of("cpu")["reference"]) is Reference


class Careless(Reference):
    """A backend for GPUs that leaves out their process group."""

    name, device = "careless", "cuda"


def test_a_backend_whose_workers_would_compute_on_another_kind_of_device_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setenv("MLMCLM_BACKEND", "careless")
    mlmclm.register("backend", None, Careless)
    try:
        with pytest.raises(UserError, match="backend 'careless' is for the device cuda, but its process_group 'gloo'"):
            backend_of("cuda")
        monkeypatch.setattr(Careless, "process_group", "nccl")
        assert isinstance(backend_of("cuda"), Careless)
    finally:
        KINDS["backend"].remove("careless")


def test_a_gpu_is_the_best_device_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (best_device(), visible("cuda"), visible("cpu")) == (torch.device("cpu"), False, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (best_device(), visible("cuda")) == (torch.device("cuda"), True)


@pytest.mark.parametrize(("group", "device"), [("gloo", "cpu"), ("nccl", "cuda")])
def test_the_process_group_tells_the_workers_device(monkeypatch: pytest.MonkeyPatch, group: str, device: str) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: group)
    assert device_of_workers().type == device
    assert backend_of(device_of_workers()).in_host_memory == (device == "cpu")
