"""Training on chunks of documents, in mixes, on real Ray Train: equal to a plain loop over padded rows, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from mlmclm.cli.main import main
from mlmclm.corpora.mixed_blocks import InTurns, MixedBlocks, rows_of_length
from mlmclm.corpora.mixes import Mix
from mlmclm.corpora.row_lengths import row_lengths
from mlmclm.corpora.tokenizer import special_ids
from mlmclm.errors import UserError
from mlmclm.evaluation.language_model import Texts
from mlmclm.models.build import build_model
from mlmclm.models.sizes import SIZES
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import states
from mlmclm.pretraining.initial import check_architecture, first_config
from mlmclm.pretraining.seen import training_batches
from mlmclm.pretraining.state_facts import flops, state_facts, tokens_by_source
from mlmclm.storage.place import Place
from mlmclm.studies.exports import export_models
from mlmclm.studies.prepare import PreparedStudy, prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.study_sweep import prepare_tasks
from mlmclm.studies.work import train_missing_stages
from small_study import write_mixed

PHASES = [
    {"name": "pretrain", "steps": 5, "block_length": 20},  # neither divides 32 nor is a multiple of it
    {"name": "ext", "steps": 5, "block_length": 61, "batch": 4, "mix": "verse"},
]
MODELS = ("1m-mlm40-5", "1m-mlm40-5-clm-10")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chunks")
    recipe = {
        "precision": "fp32", "rows": "chunks", "phases": PHASES, "evaluation_blocks": 6, "micro_batch": 2,
        "revisions_every": None, "workers": 1,
    }  # fmt: skip
    return write_mixed(folder, models=list(MODELS), recipe=recipe)


@pytest.fixture(scope="module")
def trained(session: None, path: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedStudy:
    made = prepare_study(load_study(path), Place(tmp_path_factory.mktemp("store"), path.parent / "data"))
    train_missing_stages(made)
    return made


def chunks(made: PreparedStudy, length: int, mix: Mix | None = None) -> MixedBlocks:
    found = rows_of_length(made.corpus.train, length, "chunks", made.corpus.tokenizer, mix)
    assert isinstance(found, MixedBlocks)
    return found


def mean_length(made: PreparedStudy, source: str, length: int) -> float:
    rows = chunks(made, length, ((source, 1),)).sources[source]
    end = special_ids(made.corpus.tokenizer)["eos"]
    return float(row_lengths(rows.take(np.arange(len(rows))), end).mean())


def logits(model: torch.nn.Module, ids: torch.Tensor, real: torch.Tensor, causal: bool) -> torch.Tensor:
    """Logits of padded rows, [n, length, vocabulary], whose tokens see no filling."""
    length = ids.shape[1]
    allowed = real[:, None, None, :].expand(-1, 1, length, -1).clone()
    if causal:
        allowed &= torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    found: torch.Tensor = model(ids, attention_mask=mask).logits
    return found


@pytest.mark.slow
def test_chunks_in_two_phases_are_a_plain_loop_over_padded_rows(trained: PreparedStudy) -> None:
    name, recipe = parse_name(MODELS[-1]), trained.study.recipe
    end = special_ids(trained.corpus.tokenizer)["eos"]
    config = first_config("1m", None, trained.corpus.tokenizer, Recipe(block_length=61))
    config._attn_implementation = "eager"
    model = build_model(config, recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=recipe.adam_betas, eps=recipe.adam_eps, weight_decay=recipe.weight_decay
    )
    losses, tokens, shorter = [], [], []
    for batch in training_batches(
        trained.corpus.train, recipe, range(10), model=name, tokenizer=trained.corpus.tokenizer
    ):
        rows = chunks(trained, 20 if batch.step < 5 else 61, None if batch.step < 5 else (("verse", 1),))
        assert np.array_equal(batch.lengths, row_lengths(rows.take(batch.blocks), end))
        assert (batch.blocks >= rows.first["verse"]).sum() == (2 if batch.step < 5 else 4)
        assert batch.labels is not None
        ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
        real = torch.arange(ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]
        assert not (labels[~real] != -100).any()
        found = logits(model, ids, real, causal=batch.step >= 5)
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens.append(int(real.sum()))
        shorter.append(not real.all())
    assert any(shorter[:5]) and any(shorter[5:]), "there is filling"
    curve = [row for row in trained.curve(name) if "loss" in row]
    assert [row["loss"] for row in curve] == pytest.approx(losses, rel=2e-5)
    key = trained.target(name).key(trained.fingerprint)
    weights = load_file(states.state_folder(trained.place.store, key) / "state.safetensors")
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(weights[f"w/{parameter}"], value.detach(), rtol=0, atol=2e-4)
    # The tokens of a card are those of the mean chunk; the batches' own are near.
    told = tokens_by_source(trained.target(name), recipe, trained.corpus)
    read = (("prose", 20), ("verse", 20), ("verse", 61))
    means = {(source, length): mean_length(trained, source, length) for source, length in read}
    assert told == {
        "prose": round(30 * means["prose", 20]),
        "verse": round(10 * means["verse", 20]) + round(20 * means["verse", 61]),
    }
    assert sum(told.values()) == pytest.approx(sum(tokens), rel=0.1)
    assert sum(told.values()) < trained.target(name).tokens(recipe)


@pytest.mark.slow
def test_chunks_are_counted_in_the_sources_that_are_read_only(trained: PreparedStudy) -> None:
    flops(trained.target(parse_name(MODELS[-1])), trained.study.recipe, SIZES["1m"], 400, trained.corpus)
    for name, lengths in (("prose", {20}), ("verse", {20, 61})):
        folder = trained.corpus.sources[name].folder
        assert {int(file.stem.rpartition("-")[2]) for file in folder.glob("chunks-train-*.json")} == lengths


@pytest.mark.slow
def test_tokens_per_second_leave_filling_out(trained: PreparedStudy) -> None:
    name, recipe = parse_name(MODELS[0]), trained.study.recipe
    batches = training_batches(trained.corpus.train, recipe, range(5), model=name, tokenizer=trained.corpus.tokenizer)
    each = [int(batch.lengths.sum()) for batch in batches]
    tokens = sum(each)
    curve = [row for row in trained.curve(name) if "loss" in row]
    assert [row["tokens"] for row in curve] == each
    (rate,) = {row["tokens_per_second"] for row in curve}
    # The five steps were measured together: their seconds, and the time that combining the metrics took.
    seconds = sum(row["step_seconds"] for row in curve)
    assert seconds <= tokens / rate < 40 * 20 / rate


@pytest.mark.slow
def test_the_card_counts_tokens_and_flops_without_filling(trained: PreparedStudy) -> None:
    name, study = parse_name(MODELS[0]), trained.study
    state = trained.target(name)
    facts = state_facts(name, state, study.recipe, trained.corpus, study.sources, [])
    means = {source: mean_length(trained, source, 20) for source in ("prose", "verse")}
    assert facts["tokens"] == round(30 * means["prose"]) + round(10 * means["verse"])
    assert facts["recipe"]["rows"] == "chunks"
    assert f"{round(10 * means['verse']):,} tokens seen" in facts["corpus"]["source verse"]
    rows = InTurns(chunks(trained, 20), study.recipe.mix or ())
    sampled = rows.take(np.linspace(0, len(rows) - 1, min(len(rows), 1024)).astype(np.int64))
    lengths = row_lengths(sampled, special_ids(trained.corpus.tokenizer)["eos"])
    size = SIZES["1m"]
    head = trained.corpus.vocabulary * size.hidden
    keys = float((lengths**2).sum() / lengths.sum())
    per_token = 6 * size.layers * size.products + 12 * size.attended * size.layers * keys + 6 * 0.4 * head
    assert flops(state, study.recipe, size, trained.corpus.vocabulary, trained.corpus) == pytest.approx(
        40 * lengths.mean() * per_token, rel=2e-3
    )


@pytest.mark.slow
def test_exported_tokenizers_begin_texts_with_bos_as_chunks_do(trained: PreparedStudy) -> None:
    ids = special_ids(trained.corpus.tokenizer)
    export_models(trained)
    for model, part, kind in ((MODELS[0], "", AutoModelForMaskedLM), (MODELS[1], "decoder", AutoModelForCausalLM)):
        folder = trained.model_folder(parse_name(model)) / part
        kind.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer("Anna was here")["input_ids"]
        assert text[0] == ids["bos"] == tokenizer.bos_token_id and (text[-1] == ids["eos"]) == (part == "")
        assert text.count(ids["bos"]) == 1 and text.count(ids["eos"]) == (part == "")
        own = Texts.of(tokenizer)
        assert (own.start, own.end) == ([ids["bos"]], [ids["eos"]] if part == "" else [])
    pair = AutoTokenizer.from_pretrained(trained.model_folder(parse_name(MODELS[0])))("Anna", "Berta")["input_ids"]
    assert pair[0] == ids["bos"] and pair.count(ids["eos"]) == 2 and pair[-1] == ids["eos"]
    generation = json.loads(
        (trained.model_folder(parse_name(MODELS[1])) / "decoder" / "generation_config.json").read_text()
    )
    assert generation["bos_token_id"] == ids["bos"] and generation["eos_token_id"] == ids["eos"]


@pytest.mark.slow
def test_fine_tuning_without_bos_is_said(trained: PreparedStudy, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_tasks(trained, trained.study.find_space())
    assert "sst2, conll2003: the models have seen BOS before each chunk" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_order_of_the_data_is_exported_without_filling(
    trained: PreparedStudy, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words: list[Any] = ["data", "order", path, "--model", MODELS[-1], "--export", tmp_path / "order"]
    words += ["--store", trained.place.store, "--data", path.parent / "data"]
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    rows = datasets.load_dataset(str(tmp_path / "order"), split="train", cache_dir=str(tmp_path / "cache"))
    wanted = [
        {"input_ids": ids[:length], "step": batch.step}
        for batch in training_batches(
            trained.corpus.train, trained.study.recipe, range(10), model=parse_name(MODELS[-1]),
            tokenizer=trained.corpus.tokenizer, masked=False,
        )
        for ids, length in zip(batch.input_ids.tolist(), batch.lengths.tolist(), strict=True)
    ]  # fmt: skip
    assert rows.to_list() == wanted
    assert len({len(row["input_ids"]) for row in wanted}) > 5
    assert f"{sum(len(row['input_ids']) for row in wanted):,} tokens" in shown
    with pytest.raises(SystemExit):
        main([*map(str, words[:5]), "--steps", "0:1", *map(str, words[7:])])
    printed = capsys.readouterr().out.splitlines()
    for row, line in zip(wanted, printed, strict=False):
        ids = line.partition(": ")[2].partition(" |")[0].removesuffix(" ...").split()
        assert len(ids) == min(32, len(row["input_ids"])), "no filling is shown"


def test_settings_that_chunks_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"phase 'a': tokens 100: .* give steps"):
        Recipe.model_validate({"rows": "chunks", "phases": [{"name": "a", "tokens": 100}]})
    with pytest.raises(ValueError, match="neither divides"):
        Recipe.model_validate({"block_length": 32, "phases": [{"name": "a", "steps": 10, "block_length": 20}]})
    with pytest.raises(UserError, match=r"recipe.rows: chunks: 'bert' models .* rows: joined"):
        check_architecture("bert", Recipe(rows="chunks"))
    assert "rows" not in Recipe().identity() and Recipe(rows="chunks").identity()["rows"] == "chunks"
