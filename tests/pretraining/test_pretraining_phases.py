"""Training in phases on real Ray Train: equal to a plain loop, and bit-equal when workers are killed in each phase."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_training import dying_at
from transformers import AutoModelForMaskedLM

from mlmclm.corpora.mixed_blocks import in_turns
from mlmclm.corpora.tokenizer import vocabulary
from mlmclm.errors import UserError
from mlmclm.launches import run_stage as launch
from mlmclm.models.architectures import set_rope
from mlmclm.models.build import build_model
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import states
from mlmclm.pretraining.collator import Collator
from mlmclm.pretraining.initial import first_config
from mlmclm.pretraining.seen import training_batches
from mlmclm.pretraining.worker import VALIDATION_STEP
from mlmclm.storage.place import Place
from mlmclm.studies.exports import export_models, export_revisions
from mlmclm.studies.prepare import PreparedStudy, prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.work import train_missing_stages
from small_models import save_small_model
from small_study import write_mixed

PHASES = [
    {"name": "pretrain", "steps": 8, "block_length": 16, "warmup_steps": 3, "batch_warmup": {"steps": 5, "first": 4}},
    {"name": "ext", "steps": 6, "block_length": 64, "batch": 4, "decay": "1-sqrt", "final_share": 0.5, "rope_base": 160_000},
    {"name": "cross", "steps": 5, "peak_learning_rate": 1e-3, "decay": "linear", "decay_steps": 3, "final_share": 0.1, "moments": "new"},
]  # fmt: skip
MODELS = ("1m-mlm40-8", "1m-mlm40-14", "1m-mlm40-14-clm-19")


def prepared(study_path: Path, store: Path, models: tuple[str, ...] = MODELS, **recipe: Any) -> PreparedStudy:
    study = load_study(study_path)
    values = study.recipe.model_dump(exclude={"warmup_steps", "decay_steps"}) | {"phases": PHASES, "precision": "fp32"}
    made = study.model_copy(
        update={
            "models": models,
            "baseline": None,
            "recipe": Recipe.model_validate(values | {"micro_batch_tokens": 64, "revisions_every": 4} | recipe),
        }
    )
    return prepare_study(made, Place(store, study_path.parent / "data"))


@pytest.fixture(scope="module")
def trained(session: None, study_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedStudy:
    made = prepared(study_path, tmp_path_factory.mktemp("store"), workers=1)
    train_missing_stages(made)
    return made


def weights(made: PreparedStudy, model: str) -> dict[str, torch.Tensor]:
    key = made.target(parse_name(model)).key(made.fingerprint)
    tensors = load_file(states.state_folder(made.place.store, key) / "state.safetensors")
    return {name.removeprefix("w/"): tensor for name, tensor in tensors.items() if name.startswith("w/")}


def rate(step: int) -> float:
    """The closed form of the rates of `PHASES`."""
    if step < 8:
        return 3e-3 * min(1, (step + 1) / 3)
    if step < 14:
        return 3e-3 * (0.5 + 0.5 * (1 - math.sqrt((step - 8) / 6)))
    return 1e-3 * (0.1 + 0.9 * min(1, (19 - step) / 3))


@pytest.mark.slow
def test_three_phases_are_a_plain_loop_of_transformers_and_torch_s_adamw(trained: PreparedStudy) -> None:
    name, recipe = parse_name(MODELS[-1]), trained.study.recipe
    config = first_config("1m", None, trained.corpus.tokenizer, Recipe(block_length=64))
    config._attn_implementation = "eager"
    model = build_model(config, recipe.seed)
    adam: dict[str, Any] = {"betas": recipe.adam_betas, "eps": recipe.adam_eps, "weight_decay": recipe.weight_decay}
    losses, tokens = [], []
    batches = training_batches(trained.corpus.train, recipe, range(19), model=name, tokenizer=trained.corpus.tokenizer)
    for batch in batches:
        if batch.step in (0, 14):  # the last phase begins with new moments
            optimizer = torch.optim.AdamW(model.parameters(), **adam)
        if batch.step == 8:
            before = model.state_dict()
            set_rope(config, 160_000, None)
            model = build_model(config, recipe.seed)
            model.load_state_dict(before)
            moved = torch.optim.AdamW(model.parameters(), **adam)
            moved.load_state_dict(optimizer.state_dict())
            optimizer = moved
        ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
        length, causal = ids.shape[1], batch.step >= 14
        allowed = torch.ones(length, length, dtype=torch.bool)
        allowed = allowed.tril() if causal else allowed
        mask = torch.zeros(1, 1, length, length).masked_fill(~allowed, torch.finfo(torch.float32).min)
        logits = model(ids, attention_mask=mask.expand(len(ids), -1, -1, -1)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(batch.step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens.append(ids.numel())
    # Batches of 4 (sizes below 8: one, for five steps), then 8, of 16 tokens; then 4 of 64.
    assert tokens == [4 * 16] * 5 + [8 * 16] * 3 + [4 * 64] * 11
    curve = [row for row in trained.curve(name) if "loss" in row]
    assert [row["step"] for row in curve] == list(range(1, 20))
    assert [row["loss"] for row in curve] == pytest.approx(losses, rel=2e-5)
    assert [row["learning_rate"] for row in curve] == pytest.approx([rate(step) for step in range(19)])
    found = weights(trained, MODELS[-1])
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(found[parameter], value.detach(), rtol=0, atol=2e-4)
    assert sum(tokens) == trained.target(name).tokens(recipe)


@pytest.mark.slow
def test_workers_killed_in_each_phase_leave_no_trace(
    session: None, study_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = prepared(study_path, tmp_path / "undisturbed")
    train_missing_stages(undisturbed)
    monkeypatch.setattr(launch, "run_in_worker", dying_at(4))
    disturbed = prepared(study_path, tmp_path / "disturbed", checkpoint_every=2)
    train_missing_stages(disturbed)
    assert {path.name for path in disturbed.place.store.glob("killed-*")} == {"killed-0", "killed-8", "killed-14"}
    for model in MODELS:
        found, expected = weights(disturbed, model), weights(undisturbed, model)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_phases_with_their_own_mixes_are_a_plain_loop_even_if_a_worker_is_killed(
    session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = [{"name": "a", "steps": 3}, {"name": "b", "steps": 5, "mix": "verse"}]
    recipe = {"phases": phases, "precision": "fp32", "checkpoint_every": 2}
    path = write_mixed(tmp_path, models=["1m-mlm40-8"], recipe=recipe)
    made = prepare_study(load_study(path), Place(tmp_path / "store", tmp_path / "data"))
    monkeypatch.setattr(launch, "run_in_worker", dying_at(4))
    train_missing_stages(made)
    assert len(list(made.place.store.glob("killed-*"))) == 1
    name, settings = parse_name("1m-mlm40-8"), made.study.recipe
    model = build_model(first_config("1m", None, made.corpus.tokenizer, Recipe(block_length=32)), settings.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=3e-3,
        betas=settings.adam_betas,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
    )
    objective = name.last_objective
    assert objective is not None
    label = Collator(objective, vocabulary(made.corpus.tokenizer), settings.corruption, 0, None)

    def loss_of(ids: Any, labels: Any) -> torch.Tensor:
        logits = model(torch.from_numpy(ids), is_causal=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())

    blocks, first, losses, validation = made.corpus.train, made.corpus.train.first["verse"], [], []
    for batch in training_batches(blocks, settings, range(8), model=name, tokenizer=made.corpus.tokenizer):
        assert (batch.blocks >= first).sum() == (2 if batch.step < 3 else 8)
        loss = loss_of(batch.input_ids, batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if batch.step in (2, 7):  # 8 blocks: of the first mix every fourth, of the other all are of verse
            of = made.corpus.validation.sources
            prose, verse = (of[source].take(np.arange(min(8, len(of[source])))) for source in ("prose", "verse"))
            turns = in_turns(made.corpus.validation, settings.mixes(["1m"])[batch.step // 7]).take(np.arange(8))
            expected = [*prose[:6], *np.resize(verse, (2, 32))] if batch.step == 2 else [*np.resize(verse, (8, 32))]
            assert sorted(map(list, turns)) == sorted(map(list, expected))
            with torch.no_grad():
                validation.append(loss_of(*label(turns, rows=np.arange(8), step=VALIDATION_STEP)).item())
    curve = made.curve(name)
    assert [row["loss"] for row in curve if "loss" in row] == pytest.approx(losses, rel=2e-5)
    assert [row["validation_loss"] for row in curve if "validation_loss" in row] == pytest.approx(validation, rel=1e-4)


@pytest.mark.slow
def test_revisions_are_tagged_by_phase_and_have_its_positions(trained: PreparedStudy, tmp_path: Path) -> None:
    where = trained.study, trained.place, MODELS[-1], tmp_path
    _, done, _ = export_revisions(*where, "me/small", None, source="study.yaml", dry_run=False)
    assert done.tags == ("step0", "step4", "step8", "ext4", "cross2", "cross5") and not done.missing
    for tag, length, base in (("step8", 16, 10_000), ("ext4", 64, 160_000), ("cross5", 64, 160_000)):
        model = AutoModelForMaskedLM.from_pretrained("me/small-encoder", revision=tag, cache_dir=tmp_path)
        assert (model.config.max_position_embeddings, model.config.rope_parameters["rope_theta"]) == (length, base)
    last = dict(model.named_parameters())
    expected = weights(trained, MODELS[-1])
    assert all(torch.equal(last[parameter], value) for parameter, value in expected.items())


@pytest.mark.slow
def test_exported_models_have_the_positions_and_the_context_of_their_phase(trained: PreparedStudy) -> None:
    exports = dict(zip(MODELS, export_models(trained), strict=True))
    facts = {name: AutoModelForMaskedLM.from_pretrained(model.folder).config for name, model in exports.items()}
    bases = [facts[name].rope_parameters["rope_theta"] for name in MODELS]
    assert bases == [10_000, 160_000, 160_000]
    assert [facts[name].max_position_embeddings for name in MODELS] == [16, 64, 64]
    assert trained.study.context == 16
    # The validation that the last step of the second phase has logged, of transformers' own model.
    name = MODELS[1]
    model = AutoModelForMaskedLM.from_pretrained(exports[name].folder).eval()
    logged = [row["validation_loss"] for row in trained.curve(parse_name(name)) if "validation_loss" in row][-1]
    blocks = trained.corpus.validation.at_length(64)
    rows = np.arange(min(len(blocks), trained.study.recipe.evaluation_blocks))
    objective = parse_name(name).last_objective
    assert objective is not None
    label = Collator(objective, vocabulary(trained.corpus.tokenizer), trained.study.recipe.corruption, 0, None)
    ids, labels = map(torch.from_numpy, label(blocks.take(rows), rows=rows, step=VALIDATION_STEP))
    with torch.no_grad():
        logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(logged, rel=1e-4)


def test_blocks_that_no_shard_holds_are_refused(study_path: Path, tmp_path: Path) -> None:
    phases = [{"name": "a", "steps": 8, "block_length": 32 * 4096}]
    with pytest.raises(
        UserError,
        match=r"study.yaml: recipe.phases: phase 'a': block_length 131,072 is longer than each shard of the corpus's training part; allowed are ",
    ):
        prepared(study_path, tmp_path, ("1m-mlm40-8",), phases=phases, micro_batch_tokens=None)


def test_a_rope_base_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig

    with pytest.raises(UserError, match="bert models have no rotary positions"):
        set_rope(BertConfig(), 1e5, None)
    config = AutoModelForMaskedLM.from_pretrained(save_small_model(tmp_path / "euro")).config
    with pytest.raises(UserError, match="no layers with local attention"):
        set_rope(config, None, 1e5)
