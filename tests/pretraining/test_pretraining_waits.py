"""In a step the host doesn't wait for a device with memory of its own, and the step is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, math, os, sys
import torch, torch.distributed as distributed
folder = sys.argv[1]
torch.set_num_threads(1)
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/rendezvous")
from mlmclm.launches.worker_entry import import_deepspeed
import_deepspeed()  # as in a stage's worker
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EuroBertConfig
from mlmclm.backends import choice
from mlmclm.backends.reference import Reference
from mlmclm.models.build import PretrainingModel, build_model
from mlmclm.objectives.clm import Causal
from mlmclm.objectives.mlm import Masked
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.engine import Engine
from mlmclm.pretraining.partitioning import partitioning_of

class Apart(Reference):
    in_host_memory = False

class Waits(TorchDispatchMode):
    # Operations whose result the host reads. Those on the labels are numpy's, since these are the host's.
    found = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in self.found
        return func(*args, **(kwargs or {}))

waits = Waits()
def synchronize(*_):
    waits.count += 1
get_accelerator().synchronize = synchronize

def run(backend, zero, isolated, objective):
    choice._chosen[("cpu", "")] = backend
    config = EuroBertConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3,
        tie_word_embeddings=False)
    clip = 4.0 if isolated else 1.3  # some steps are clipped
    recipe = Recipe(batch=8, block_length=16, workers=1, micro_batch=2, precision="fp32", clip=clip, isolate_documents=isolated,
        deepspeed={"zero_optimization": {}} if zero else {}, zero_stage=zero)
    engine = Engine(PretrainingModel(build_model(config, 0), precision="fp32"), recipe, partitioning_of(recipe), None, 4 if isolated else None)
    engines.append(engine)  # DeepSpeed's engines synchronise when they are deleted, which would count in another's steps
    losses, norms, waits.count = [], [], 0
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(4, 8 if isolated else 300, (8, 16), generator=generator)
        labels = torch.where(torch.rand(8, 16, generator=generator) < 0.4, ids, -100)
        batches = [(ids[i:i + 2], labels[i:i + 2]) for i in range(0, 8, 2)]
        with waits:
            total, labelled, _, norm = engine.step(batches, objective, rate=1e-2)
        losses.append(total / labelled)
        norms.append(norm)
    counted = waits.count
    with waits:
        float(losses[0])
    assert waits.count == counted + 1, "a wait is seen"
    next(engine.engine.module.parameters()).data.fill_(math.nan)
    assert not math.isfinite(float(engine.step(batches, objective, rate=1e-2)[3])), "a gradient that is no number shows"
    return {"waits": counted / 6, "losses": [float(each) for each in losses], "norms": [float(each) for each in norms]}

found, engines = {}, []
for isolated, objective in ((False, Masked(40)), (True, Causal())):
    for name, backend, zero in (("host", Reference(), 0), *((f"apart-zero{zero}", Apart(), zero) for zero in (0, 1, 2))):
        found[f"{name}-{objective}"] = run(backend, zero, isolated, objective)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("waits")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("objective", ["mlm40", "clm"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_step_waits_for_no_device_with_memory_of_its_own(found: dict[str, Any], objective: str, zero: int) -> None:
    assert found[f"apart-zero{zero}-{objective}"]["waits"] == 0


@pytest.mark.parametrize("objective", ["mlm40", "clm"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_steps_are_those_of_a_device_in_the_host_s_memory(found: dict[str, Any], zero: int, objective: str) -> None:
    expected, same = found[f"host-{objective}"], found[f"apart-zero{zero}-{objective}"]
    assert same["losses"] == pytest.approx(expected["losses"], rel=2e-6)
    assert same["norms"] == pytest.approx(expected["norms"], rel=2e-5)
    clip = {"mlm40": 1.3, "clm": 4.0}[objective]
    assert min(same["norms"]) < clip < max(same["norms"]), "some steps are clipped, and some are not"
