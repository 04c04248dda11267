"""The engine's arithmetic: the same loss and the same steps however the batch is divided, and states that carry over exactly."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import json, os, sys
import torch, torch.distributed as distributed
cases, folder, rank, world = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous-{world}")
from mlmclm.launches.worker_entry import import_deepspeed
import_deepspeed()  # as in a stage's worker
import deepspeed
from pathlib import Path
from transformers import BertConfig, EuroBertConfig, ModernBertConfig
from mlmclm.models.architectures import weights_of
from mlmclm.models.build import PretrainingModel, build_model, hollow
from mlmclm.objectives.clm import Causal
from mlmclm.objectives.mlm import Masked
from mlmclm.pretraining import checkpoints
from mlmclm.pretraining.checkpoints import TrainingState, fresh, read_tensors, write_tensors
from mlmclm.backends.cpu.host import Host
from mlmclm.pretraining.engine import Engine
from mlmclm.pretraining.partitioning import SharedCopy, partitioning_of
from mlmclm.plans.recipe import Recipe

eurobert = EuroBertConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3,
    tie_word_embeddings=False)
"""
"""Beginning of the scripts of `run`."""
SCRIPT = HEAD + '''
modernbert = ModernBertConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
    max_position_embeddings=32, local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
# An odd number of parameters, of which DeepSpeed's buckets must not have one.
bert = BertConfig(vocab_size=301, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
configs = {"modernbert": modernbert, "bert": bert}

def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(4, 300, (8, 16), generator=generator)
    labels = torch.where(torch.rand(8, 16, generator=generator) < 0.1 + 0.1 * torch.arange(8)[:, None], ids, -100)
    return ids, labels

class Watched(dict):
    """Weights; notes how many elements of the model a worker holds whenever one is asked for."""

    def __init__(self, weights, model):
        super().__init__(weights)
        self.model, self.held = model, []

    def __getitem__(self, name):
        self.held.append(held(self.model))
        return super().__getitem__(name)

def held(model):
    parts = [getattr(parameter, "ds_tensor", None) for parameter in model.parameters()]
    whole = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    return whole + sum(part.numel() for part in parts if part is not None)

def copies(engine):
    """Elements of the optimiser's weights that are not the model's own memory."""
    inner, stage = engine.engine.optimizer, engine.partitioning.stage
    if stage == 0:
        return 0
    if stage == 3:
        own = [part for group in inner.fp16_partitioned_groups for part in group]
        taken = inner.fp32_partitioned_groups_flat
    else:
        own, taken = list(engine.engine.module.parameters()), inner.single_partition_of_fp32_groups
    storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    return sum(tensor.numel() for tensor in taken if tensor.untyped_storage().data_ptr() not in storages)

def keep(name, state):
    """Write a state, in rank 0; return its folder."""
    target = Path(folder) / name
    target.mkdir()
    write_tensors(target, state)
    return target

def same(revision, weights):
    assert not revision.first and not revision.second and revision.weights.keys() == weights.keys()
    assert all(torch.equal(revision.weights[name], weights[name]) for name in weights)

for case in cases:
    recipe = Recipe.model_validate(dict(batch=8, block_length=16, workers=world, micro_batch=case["micro"], zero_stage=case["zero"],
        precision=case["precision"], adam_eps=1e-8, clip=1.0, weight_decay=0.1,
        deepspeed=case.get("deepspeed", {})) | case.get("recipe", {}))
    config = next((each for name, each in configs.items() if name in case["name"]), eurobert)
    model = build_model(config, 0)
    state = fresh(weights_of(model)) if case.get("given", True) else None
    if case.get("start"):
        state = read_tensors(Path(folder) / case["start"])
    if case.get("hollow"):
        model = hollow(config)
        state = TrainingState(state.step, Watched(state.weights, model), state.first, state.second)
    first = fresh(weights_of(build_model(config, 0))).weights if state is None else dict(state.weights)
    wrapped = PretrainingModel(model, precision=case["precision"], activation_checkpointing=case.get("again", False),
        compiled=recipe.compile)
    create = Host.create
    if case["messages"]:  # as between machines
        Host.create = lambda: None
    engine = Engine(wrapped, recipe, partitioning_of(recipe), state, 4 if recipe.isolate_documents else None)
    Host.create = create
    share, losses, norms = 8 // world, [], []
    def mine(step):
        ids, labels = batch(step)
        if step == case.get("unlabelled"):
            labels[:] = -100
        if recipe.isolate_documents:
            ids[:, 5::4] = torch.where(ids[:, 5::4] % 3 == 0, 4, ids[:, 5::4])
        return [(ids[i:i + engine.micro], labels[i:i + engine.micro]) for i in range(rank * share, (rank + 1) * share, engine.micro)]
    # A revision has the weights alone: those of the start, and in the end those of the whole state.
    began = engine.state(0, moments=False)
    if rank == 0:
        same(began, first)
    for step in range(0 if state is None else state.step, 6):
        total, labelled, _, norm = engine.step(mine(step), Causal() if case["causal"] else Masked(40), rate=1e-2)
        distributed.all_reduce(total)
        losses.append(float(total / labelled)); norms.append(norm)
        if case.get("kept") and step + 1 == 3:
            middle = engine.state(3)
            if rank == 0:
                keep(case["name"] + "-three", middle)
    evaluation = engine.evaluate(iter(mine(99)), causal=case["causal"])
    final, revision = engine.state(6), engine.state(6, moments=False)
    if rank == 0:
        same(revision, final.weights)
        target = keep(case["name"], final)
        (target / "losses.json").write_text(json.dumps([losses, norms, evaluation]))
        sizes = [weight.numel() for weight in final.weights.values()]
        storages = {weight.untyped_storage().data_ptr() for weight in wrapped.parameters()}
        common = isinstance(engine.partitioning, SharedCopy) and len(storages) == 1
        facts = {"common": common, "held": state.weights.held if case.get("hollow") else [], "sizes": sizes, "copies": copies(engine)}
        (target / "facts.json").write_text(json.dumps(facts))
    distributed.barrier()  # the next case may read what rank 0 has just written
'''  # fmt: skip


STAGES = (0, 1, 2, 3)
TIED = (("modernbert", 3), ("bert", 0), ("bert", 1))
"""Kinds of models with tied matrices, each under a stage of ZeRO."""
WEIGHTED = {"loss_weights": {"clm": 7.0, "mlm": 0.02}, "adam_eps": 1e-2, "clip": 0.025}
"""A weight that shows: gradients of about 0.025 are clipped, and eps is not small beside them."""
ISOLATED = {"isolate_documents": True}
EMPTY = 2
"""A step without a labelled token, counted from 0."""
STABLE = {"optimizer": "stable-adamw", "peak_learning_rate": 2e-2, "weight_decay": 0.01}
OFFLOADED = {"zero_optimization": {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")}}

BUCKETS = {"zero_optimization": {"reduce_bucket_size": 4000}}
"""Fewer elements than the embedding, and than all others together."""


def run(folder: Path, world: int, cases: list[dict[str, Any]], script: str = SCRIPT) -> None:
    """Runs cases one after the other in `world` processes of their own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, json.dumps(cases), str(folder), str(rank), str(world)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        # All outputs: where one process fails, the others often only say that it is gone.
        outputs = [process.communicate(timeout=1500)[0][-3000:] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(outputs)
    finally:
        for process in processes:
            process.kill()


def case(name: str, **given: Any) -> dict[str, Any]:
    """A run of six steps; with `kept`, its state after three is written under its name and `-three`."""
    plain = {"name": name, "micro": None, "zero": 0, "precision": "fp32", "causal": False}
    # ZeRO 1 is DeepSpeed's own where the workers don't share memory.
    return {**plain, "messages": given.get("zero") == 1, **given}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    run(
        folder,
        1,
        [
            case("one", kept=True),
            case("one-micro2", micro=2),
            case("one-zero1", zero=1, micro=4),
            case("one-bf16", precision="bf16-autocast"),
            case("one-modernbert"),
            case("one-weighted", recipe=WEIGHTED),
            case("one-isolated", recipe=ISOLATED),
            case("one-isolated-modernbert", recipe=ISOLATED),
            case("one-bert"),
            case("one-stable", recipe=STABLE),
            *(case(f"one-unlabelled{kind}", unlabelled=EMPTY) for kind in ("", "-modernbert", "-bert")),
            case("one-unlabelled-bf16", unlabelled=EMPTY, precision="bf16-autocast"),
        ],
    )
    run(
        folder,
        2,
        [
            case("two"),
            case("two-messages", messages=True),
            case("two-zero1-common", zero=1, micro=2, messages=False),
            case("two-zero0-weighted", micro=2, recipe=WEIGHTED),
            case("two-stable", micro=2, recipe=STABLE, kept=True),
            case("two-stable-resumed", micro=2, recipe=STABLE, start="two-stable-three"),
            *(case(f"two-zero{zero}", zero=zero, micro=2, kept=True) for zero in STAGES),
            *(case(f"two-zero{zero}-resumed", zero=zero, micro=2, start=f"two-zero{zero}-three") for zero in STAGES),
            case("elastic", zero=3, start="one-three"),
            *(case(f"{kind}-hollow", zero=3, micro=2, hollow=True) for kind in ("two-zero3", "modernbert-zero3")),
            case("two-zero3-resumed-hollow", zero=3, micro=2, start="two-zero3-three", hollow=True),
            case("two-zero2-resumed-hollow", zero=2, micro=2, start="two-zero2-three", hollow=True),
            *(case(f"two-zero{zero}-own", zero=zero, micro=2, given=False) for zero in (0, 3)),
            *(case(f"two-zero{zero}-buckets", zero=zero, micro=2, deepspeed=BUCKETS) for zero in (2, 3)),
            *(case(f"{kind}-zero{zero}", zero=zero, micro=2, kept=True) for kind, zero in TIED),
            *(
                case(f"{kind}-zero{zero}-resumed", zero=zero, micro=2, start=f"{kind}-zero{zero}-three")
                for kind, zero in TIED
            ),
            case("two-zero3-offloaded", zero=3, deepspeed=OFFLOADED),
            case("two-again", again=True),
            case("two-zero3-again", zero=3, micro=2, again=True),
            case("two-weighted", micro=2, zero=2, recipe=WEIGHTED),
            *(case(f"two-isolated-zero{zero}", zero=zero, micro=2, recipe=ISOLATED) for zero in (0, 3)),
            case("two-isolated-modernbert", zero=3, micro=2, again=True, recipe=ISOLATED),
            *(case(f"two-unlabelled-zero{zero}", zero=zero, micro=2, unlabelled=EMPTY) for zero in (1, 3)),
            case("two-unlabelled", micro=2, unlabelled=EMPTY),
            case("two-unlabelled-modernbert", zero=3, micro=2, unlabelled=EMPTY, recipe=ISOLATED),
        ],
    )
    return folder


def losses(folder: Path, name: str) -> list[list[float]]:
    return json.loads((folder / name / "losses.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        "one-micro2",
        "one-zero1",
        "two",
        "two-messages",
        "two-zero0",
        "two-zero1",
        "two-zero2",
        "two-zero3",
        "two-zero3-offloaded",
        "two-again",
        "two-zero3-again",
    ],
)
def test_losses_norms_and_weights_don_t_depend_on_workers_micro_batch_zero_stage_or_activation_checkpointing(
    runs: Path, name: str
) -> None:
    expected, found = losses(runs, "one"), losses(runs, name)
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1] == pytest.approx(expected[1], rel=2e-5)
    assert _difference(runs, "one", name) < 2e-4  # Adam divides by small second moments: rounding is amplified


@pytest.mark.parametrize("zero", STAGES)
def test_a_run_taken_up_from_a_state_is_bit_equal_to_the_undisturbed_one(runs: Path, zero: int) -> None:
    assert losses(runs, f"two-zero{zero}-resumed")[0] == losses(runs, f"two-zero{zero}")[0][3:]
    assert _difference(runs, f"two-zero{zero}", f"two-zero{zero}-resumed") == 0


@pytest.mark.parametrize(("kind", "zero"), TIED)
def test_a_model_with_tied_matrices_trains_alike_under_a_zero_stage_and_is_taken_up_bit_equal(
    runs: Path, kind: str, zero: int
) -> None:
    expected, found = losses(runs, f"one-{kind}"), losses(runs, f"{kind}-zero{zero}")
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1] == pytest.approx(expected[1], rel=2e-5)
    assert losses(runs, f"{kind}-zero{zero}-resumed")[0] == found[0][3:]
    assert _difference(runs, f"{kind}-zero{zero}", f"{kind}-zero{zero}-resumed") == 0


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("two-zero3-hollow", "two-zero3"),
        ("modernbert-zero3-hollow", "modernbert-zero3"),
        ("two-zero3-resumed-hollow", "two-zero3"),
        ("two-zero2-resumed-hollow", "two-zero2"),
        *((f"two-zero{zero}-own", f"two-zero{zero}") for zero in (0, 3)),
        *((f"two-zero{zero}-buckets", f"two-zero{zero}") for zero in (2, 3)),
        ("two-zero1-common", "two-zero0"),
    ],
)
def test_where_weights_come_from_and_the_size_of_buckets_change_no_bit(runs: Path, name: str, same: str) -> None:
    assert losses(runs, name)[0] == losses(runs, same)[0][-len(losses(runs, name)[0]) :]
    assert _difference(runs, same, name) == 0


def facts(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "facts.json").read_text())


@pytest.mark.parametrize("name", ["two-zero3-hollow", "modernbert-zero3-hollow", "two-zero3-resumed-hollow"])
def test_under_zero_3_a_worker_holds_no_more_than_its_part_of_each_weight_and_one_weight(runs: Path, name: str) -> None:
    sizes = facts(runs, name)["sizes"]
    parts = [-(-size // 2) for size in sizes]
    assert facts(runs, name)["held"] == [sum(parts[:place]) + size for place, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("name", "common"),
    [("two", True), ("two-zero1-common", True), ("bert-zero0", True), ("two-zero1", False), ("two-messages", False)],
)
def test_two_workers_of_a_machine_have_their_weights_in_common(runs: Path, name: str, common: bool) -> None:
    assert facts(runs, name)["common"] is common


@pytest.mark.parametrize("name", ["two-zero1", "two-zero2", "two-zero3", "modernbert-zero3", "two-zero2-resumed"])
def test_the_optimiser_s_weights_are_the_model_s_own(runs: Path, name: str) -> None:
    assert facts(runs, name)["copies"] == 0


def test_a_state_of_one_worker_is_taken_up_by_two_under_another_zero_stage(runs: Path) -> None:
    assert losses(runs, "elastic")[0] == pytest.approx(losses(runs, "one")[0][3:], rel=2e-6)


def test_bf16_products_stay_close_to_fp32_while_the_weights_start_unrounded(runs: Path) -> None:
    assert losses(runs, "one-bf16")[0] == pytest.approx(losses(runs, "one")[0], abs=2e-2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("one-weighted", "two-weighted"),
        ("one-weighted", "two-zero0-weighted"),
        ("one-isolated", "two-isolated-zero0"),
        ("one-isolated", "two-isolated-zero3"),
        ("one-isolated-modernbert", "two-isolated-modernbert"),
    ],
)
def test_weighted_losses_and_isolated_documents_don_t_depend_on_the_division_either(
    runs: Path, one: str, other: str
) -> None:
    expected, found = losses(runs, one), losses(runs, other)
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1] == pytest.approx(expected[1], rel=2e-5)
    assert found[2] == pytest.approx(expected[2], rel=2e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("one", {"weight": 1.0, "eps": 1e-8, "clip": 1.0}),
        ("one-weighted", {"weight": 0.02, "eps": 1e-2, "clip": 0.025}),
        ("one-unlabelled", {"weight": 1.0, "eps": 1e-8, "clip": 1.0}),
    ],
)
def test_the_steps_equal_torch_s_own_adamw_on_the_weighted_mean_loss_over_the_whole_batch(
    runs: Path, name: str, settings: dict[str, float]
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    config = EuroBertConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        mask_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = EuroBertForMaskedLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=settings["eps"], weight_decay=0.1)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(4, 300, (8, 16), generator=generator)
        chosen = torch.rand(8, 16, generator=generator) < 0.1 + 0.1 * torch.arange(8)[:, None]
        return ids, torch.where(chosen, ids, -100)

    found: list[float] = []
    norms: list[float] = []
    for step in range(6):
        ids, labels = batch(step)
        if "unlabelled" in name and step == EMPTY:
            labels[:] = -100
        logits = model(ids).logits.view(-1, 300)
        total = torch.nn.functional.cross_entropy(logits, labels.view(-1), reduction="sum")
        count = int((labels != -100).sum())
        loss = total / max(1, count)
        found.append(loss.item() if count else float("nan"))
        (loss * settings["weight"]).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])))
        optimiser.step()
        optimiser.zero_grad()
    assert max(norms) > settings["clip"], "some steps are clipped"
    assert losses(runs, name)[0] == pytest.approx(found, rel=2e-6, nan_ok=True)
    assert losses(runs, name)[1] == pytest.approx(norms, rel=2e-5)
    trained = load_file(runs / name / "state.safetensors")
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[f"w/{parameter_name}"], parameter.detach(), rtol=0, atol=2e-4)
    ids, labels = batch(99)
    logits, target = model(ids).logits.view(-1, 300), labels.view(-1)
    right = (logits.argmax(1) == target)[target != -100]
    loss = torch.nn.functional.cross_entropy(logits, target).detach()
    assert losses(runs, name)[2] == pytest.approx([float(loss), float(right.float().mean())], rel=2e-5)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *((f"two-unlabelled-zero{zero}", "one-unlabelled") for zero in (1, 3)),
        ("two-unlabelled", "one-unlabelled"),
        ("two-unlabelled-modernbert", "one-isolated-modernbert"),
        ("one-unlabelled-modernbert", "one-modernbert"),
        ("one-unlabelled-bert", "one-bert"),
        ("one-unlabelled-bf16", "one-bf16"),
    ],
)
def test_a_step_without_a_labelled_token_has_a_gradient_of_0_and_training_goes_on(
    runs: Path, name: str, other: str
) -> None:
    (found, norms, _), (expected, *_) = losses(runs, name), losses(runs, other)
    same = slice(None if other == "one-unlabelled" else EMPTY)  # the moments of the empty step change those after it
    assert found[same] == pytest.approx(expected[same], rel=2e-6, nan_ok=True)
    assert [math.isnan(loss) for loss in found] == [step == EMPTY for step in range(6)]
    assert [norm == 0 for norm in norms] == [step == EMPTY for step in range(6)]


def test_stable_adamw_does_not_depend_on_workers_either_and_is_taken_up_bit_equal(runs: Path) -> None:
    expected, found = losses(runs, "one-stable"), losses(runs, "two-stable")
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1] == pytest.approx(expected[1], rel=2e-5)
    assert losses(runs, "one")[0] != expected[0]
    assert losses(runs, "two-stable-resumed")[0] == found[0][3:]
    assert _difference(runs, "two-stable", "two-stable-resumed") == 0


def _difference(folder: Path, a: str, b: str) -> float:
    from safetensors.torch import load_file

    one, other = (load_file(folder / name / "state.safetensors") for name in (a, b))
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)
