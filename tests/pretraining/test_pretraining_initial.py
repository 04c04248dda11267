"""A study that continues from a given model: its weights are where training begins, kept in the store, and part of every key."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    LlamaForCausalLM,
)

from mlmclm import versions
from mlmclm.cli.main import main
from mlmclm.corpora.tokenizer import special_ids
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.models.architectures import final_states, load_weights, weights_of
from mlmclm.models.attention import use_attention
from mlmclm.models.sizes import parameters
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import history, make_plan
from mlmclm.pretraining.checkpoints import read_tensors
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.seen import training_batches
from mlmclm.pretraining.worker import first_model, hollow_model, write_beginning
from mlmclm.storage.files import stable_hash
from mlmclm.storage.place import Place
from mlmclm.studies.exports import export_models
from mlmclm.studies.prepare import PreparedStudy, find_prepared, prepare_study, with_suite
from mlmclm.studies.study_file import load_study
from mlmclm.studies.study_sweep import study_space
from small_models import save_small_decoder, save_small_model
from small_study import run, write_study

MODELS = ["tiny-untrained", "tiny-mlm40-20", "tiny-clm-50%-mlm40-20"]
KNOWN = 400
"""Tokens of the decoder; the mask token is one more."""


def study(folder: Path, source: str | Path | None = None, **changes: Any) -> Path:
    """A study file beside its data that continues from a small decoder."""
    given = {"tiny": str(source or save_small_decoder(folder / "decoder"))}
    path = write_study(folder, **({"initial": given, "models": MODELS, "baseline": None} | changes))
    content = yaml.safe_load(path.read_text())
    if "tokenizer" not in changes:
        del content["tokenizer"]
    path.write_text(yaml.safe_dump(content))
    return path


def made(path: Path, store: Path | None = None) -> PreparedStudy:
    return prepare_study(load_study(path), Place(store or path.parent / "store", path.parent / "data"))


def job_of(prepared: PreparedStudy) -> StageJob:
    """What a worker is told of the first stage."""
    stage = prepared.plan.stages[0]
    corpus, recipe = prepared.corpus, prepared.study.recipe
    return StageJob(
        stage=stage, shape=prepared.initial["tiny"].size, store=prepared.place.store,
        run_folder=Path(), corpus=corpus.key, train=corpus.train, validation=corpus.validation, tokenizer=corpus.tokenizer,
        whole_recipe=recipe, fingerprint=prepared.fingerprint, device="cpu",
    )  # fmt: skip


def check_grown(weights: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """All of the source's weights, and one row more of its embedding, the mean of the others."""
    assert weights.keys() == source.keys()
    for name, tensor in source.items():
        torch.testing.assert_close(weights[name][: len(tensor)], tensor, rtol=0, atol=0)
    embedding = weights["model.embed_tokens.weight"]
    assert len(embedding) == KNOWN + 1
    torch.testing.assert_close(embedding[KNOWN], embedding[:KNOWN].mean(0))


def logits(model: Any, ids: Tensor, *, causal: bool) -> Tensor:
    use_attention(model)
    return model.get_output_embeddings()(final_states(model.base_model, ids, causal=causal))


@torch.no_grad()
def test_a_worker_begins_with_the_folder_s_weights_and_sees_in_the_objective_s_direction(tmp_path: Path) -> None:
    prepared = made(study(tmp_path))
    original = LlamaForCausalLM.from_pretrained(tmp_path / "decoder").eval()
    source = weights_of(original)
    shutil.rmtree(tmp_path / "decoder")  # a worker reads the store only
    job = job_of(prepared)
    model = first_model(job)
    check_grown(weights_of(model), source)
    hollow = hollow_model(job)
    assert all(parameter.is_meta for parameter in hollow.parameters())
    for _ in range(2):  # a second attempt writes it anew
        write_beginning(job, tmp_path / "beginning")
    load_weights(hollow, read_tensors(tmp_path / "beginning").weights)
    assert all(torch.equal(tensor, weights_of(model)[name]) for name, tensor in weights_of(hollow).items())
    assert special_ids(prepared.corpus.tokenizer)["mask"] == KNOWN == model.config.mask_token_id
    ids = torch.randint(4, KNOWN, (2, 24), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, -1] = ids[:, -1] % 300 + 4
    torch.testing.assert_close(logits(model, ids, causal=True)[..., :KNOWN], original(ids).logits, rtol=1e-4, atol=1e-4)
    for causal in (True, False):
        before, after = (logits(model, each, causal=causal)[:, 3] for each in (ids, changed))
        assert torch.equal(before, after) == causal


def test_the_untrained_model_is_exported_as_an_encoder_that_transformers_loads(tmp_path: Path) -> None:
    path = study(tmp_path, models=["tiny-untrained"])
    (exported,) = export_models(made(path))
    check_grown(
        load_file(exported.folder / "model.safetensors"),
        weights_of(LlamaForCausalLM.from_pretrained(tmp_path / "decoder")),
    )
    masked, base = (kind.from_pretrained(exported.folder).eval() for kind in (AutoModelForMaskedLM, AutoModel))
    assert type(masked).__name__ == "EuroBertForMaskedLM"
    ids = torch.randint(4, KNOWN, (1, 24), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, -1] = ids[:, -1] % 300 + 4
    with torch.no_grad():
        assert not torch.equal(masked(ids).logits[:, 3], masked(changed).logits[:, 3])
        torch.testing.assert_close(base(ids).last_hidden_state, masked.model(ids).last_hidden_state)
    card = (exported.folder / "README.md").read_text()
    assert "A EuroBERT text encoder of size tiny with the weights of decoder, not trained any further." in card
    assert str(tmp_path) not in card


def test_the_key_of_a_state_has_the_given_weights_in_it_and_that_of_another_is_as_it_was() -> None:
    recipe = Recipe(warmup_steps=2, decay_steps=4)
    state = history(parse_name("1m-clm-10"), recipe)
    segments = [segment.identity() for segment in state.segments]
    old = {"size": "1m", "legs": segments, "shared": "study", "engine": versions.STATES}
    assert state.key("study") == stable_hash(old)
    keys = {history(parse_name("1m-clm-10"), recipe, initial).key("study") for initial in (None, "a", "b")}
    assert len(keys) == 3


def test_changed_weights_are_another_model_and_a_folder_that_is_gone_is_the_one_in_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = study(tmp_path), tmp_path / "decoder"
    first = made(path)
    shutil.move(folder, tmp_path / "away")
    gone = made(path)
    found = find_prepared(first.study, first.place)
    assert found is not None
    assert first.initial == gone.initial == found.initial and first.fingerprint == gone.fingerprint == found.fingerprint
    assert "decoder no longer exists; the store's copy is used" in " ".join(capsys.readouterr().err.split())
    save_small_decoder(folder, seed=1)
    other = made(path)
    assert other.corpus.key == first.corpus.key  # its tokenizer is the same
    keys = [
        [prepared.target(name).key(prepared.fingerprint) for name in first.plan.models] for prepared in (first, other)
    ]
    assert len({*keys[0], *keys[1]}) == 6
    shutil.rmtree(folder)
    shutil.move(tmp_path / "away", folder)
    assert made(path).initial == first.initial


def test_damaged_files_in_the_store_are_made_anew_or_named(tmp_path: Path) -> None:
    path = study(tmp_path, models=["tiny-untrained"])
    prepared = made(path)
    file = prepared.initial["tiny"].folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert find_prepared(prepared.study, prepared.place) is None
    assert made(path).initial == prepared.initial and file.read_bytes() == whole
    file.write_bytes(whole[:-4] + b"abcd")
    with pytest.raises(
        UserError, match=r"model\.safetensors is not what was written.*Delete this folder and run again"
    ):
        export_models(made(path))
    (file.parent / "checksums.json").unlink()
    with pytest.raises(UserError, match=r"checksums\.json.*Delete this folder and run again"):
        prepared.initial["tiny"].check()


def test_the_shape_is_the_model_s_in_the_plan_the_facts_and_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study(tmp_path)
    assert main_says(capsys, "plan", "--study", path, "--json")["sizes"]["tiny"] == {
        "architecture": "eurobert", "vocabulary": KNOWN, "vocabulary_of": "its own",
        "parameters": sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tmp_path / "decoder").model.parameters()),
    }  # fmt: skip
    size = made(path).initial["tiny"].size
    assert size.vocabulary == KNOWN + 1
    assert parameters(size, KNOWN + 1) == sum(p.numel() for p in first_model(job_of(made(path))).model.parameters())


def main_says(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    """What a command line prints as JSON, in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    captured = capsys.readouterr()
    assert ended.value.code in (0, None), captured.err
    return json.loads(captured.out)


def test_dry_run_and_suites_know_the_study_s_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study(tmp_path)
    words = ("pretrain", path, "--store", tmp_path / "store", "--data", tmp_path / "data", "--dry-run", "--json")
    found = main_says(capsys, *words)
    titles = ["tiny mlm40 0-20", "tiny clm 0-10", "tiny mlm40 10-20"]
    assert ([stage["title"] for stage in found["stages"]], found["steps_to_train"]) == (titles, 40)
    assert found["corpus"] == "to be prepared" and not (tmp_path / "store" / "initial").exists()
    made(path)
    assert main_says(capsys, *words)["corpus"] == "prepared"
    one = main_says(capsys, *words[:2], "tiny-clm-50%-mlm40-20", *words[2:])
    assert [stage["models"] for stage in one["stages"]] == [["tiny-clm-10-mlm40-20"]] * 2
    suite = tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"size": "tiny", "models": ["clm-50%-mlm15-20", "1m-clm-20"]}))
    assert with_suite(load_study(path), str(suite)).models == ("tiny-clm-10-mlm15-20", "1m-clm-20")
    suite.write_text(yaml.safe_dump({"size": "tiney", "models": ["clm-20"]}))
    with pytest.raises(UserError, match=r"unknown size 'tiney'\. Did you mean 'tiny'"):
        with_suite(load_study(path), str(suite))


def test_a_study_s_names_are_spelled_once_whatever_the_file_says(tmp_path: Path) -> None:
    path = study(tmp_path, models=["1m-untrained", "1m-clm-50%-mlm40-20"], baseline="1m-clm-50%-mlm40-20")
    loaded = load_study(path)
    assert (loaded.models, loaded.baseline) == (("1m-untrained", "1m-clm-10-mlm40-20"), "1m-clm-10-mlm40-20")
    path = study(tmp_path / "twice", models=["tiny-clm-10-mlm40-20", "tiny-clm-50%-mlm40-20"])
    with pytest.raises(UserError, match=r"study\.yaml: models: listed twice: tiny-clm-10-mlm40-20"):
        load_study(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ["tinny-mlm40-20"]}, "unknown size 'tinny'. Did you mean 'tiny'"),
        ({"initial": {"my-model": "x"}}, "the name of a model to continue from is letters, digits"),
        ({"initial": {"1m": "x"}}, "'1m' means something else in models' names"),
        ({"initial": {"mlm40": "x"}}, "'mlm40' means something else in models' names"),
        ({"initial": {"mntp15": "x"}}, "'mntp15' means something else in models' names"),
        (
            {"initial": {}, "models": ["1m-clm-20"]},
            "tokenizer: it is missing; only models to continue from bring their own",
        ),
    ],
)
def test_a_wrong_study_file_says_what_is_allowed(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_study(study(tmp_path, "nowhere", **changes))
    assert message in str(caught.value) and "study.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"rows": "chunks"}, "recipe.rows: chunks: 'bert' models can't keep the documents of a batch apart"),
        ({"rope_base": 5000}, "recipe: rope_base 5000: models of size tiny (bert) have no rotary positions"),
    ],
)
def test_what_a_given_model_cannot_do_is_refused_before_any_work(
    tmp_path: Path, recipe: dict[str, Any], message: str
) -> None:
    folder = save_small_model(tmp_path / "bert")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=400, **shape)).save_pretrained(folder)
    path = study(tmp_path, folder, models=["tiny-mlm40-20"])
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(content | {"recipe": content["recipe"] | recipe}))
    with pytest.raises(UserError) as caught:
        made(path)
    assert f"study.yaml: {message}" in str(caught.value)
    assert not (tmp_path / "store" / "corpora").exists()
    if "rope_base" not in recipe:  # a model that isn't trained may be of any kind
        path.write_text(
            yaml.safe_dump(yaml.safe_load(path.read_text()) | {"models": ["tiny-untrained", "1m-mlm40-20"]})
        )
        assert made(path)


def test_the_example_of_a_continued_model_is_a_study() -> None:
    loaded = load_study(Path(__file__).parents[2] / "examples" / "continue.yaml")
    assert loaded.models == ("smol-untrained", "smol-mlm40-1k", "smol-clm-500-mlm40-1k")
    assert all(
        loaded.recipe.block_length >= (study_space(loaded).protocol_for(task).max_length or 0)
        for task in study_space(loaded).tasks
    )
    assert len(make_plan(loaded.parsed, loaded.recipe).stages) == 3


def recipe_of(path: Path, **changes: Any) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["recipe"] | changes


def test_what_does_not_fit_is_refused_before_the_corpus_is_read_and_by_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study(tmp_path)
    other = save_small_decoder(tmp_path / "other", vocabulary=380)
    electra = tmp_path / "electra"
    shutil.copytree(tmp_path / "decoder", electra)
    ElectraForMaskedLM(
        ElectraConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ).save_pretrained(electra)
    lacking = tmp_path / "lacking"
    shutil.copytree(tmp_path / "decoder", lacking)
    weights = load_file(lacking / "model.safetensors")
    save_file(
        {name: one for name, one in weights.items() if name != "model.norm.weight"}, lacking / "model.safetensors"
    )
    own_head = tmp_path / "own_head"
    shutil.copytree(tmp_path / "decoder", own_head)
    head = {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}
    save_file({**weights, **head}, own_head / "model.safetensors", {"format": "pt"})
    given = {"tiny": str(tmp_path / "decoder")}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"initial": given | {"other": str(other)}}, r"'other' \(.*other\) and 'tiny' \(.*decoder\) have different tokenizers"),
        ({"tokenizer": {"path": str(other)}}, r"the tokenizer is not this model's: .* has the id"),
        ({"tokenizer": {"train_vocab_size": 400}}, r"tokenizer\.train_vocab_size: 'tiny' continues from .*Leave 'tokenizer' out"),
        ({"recipe": recipe_of(path, block_length=128)}, r"recipe\.block_length 128: 'tiny' .* made for 64 positions at most"),
        ({"initial": {"tiny": str(tmp_path / "nowhere")}}, r"nowhere: no such model folder"),
        ({"initial": {"tiny": str(electra)}}, r"'electra' cannot be continued from; supported: bert, eurobert"),
        ({"initial": {"tiny": str(own_head)}}, r"own_head/config\.json: tie_word_embeddings: true, but the weights have an LM head that differs"),
        ({"initial": {"tiny": str(lacking)}}, r"lacking: the weights lack model\.norm\.weight; a whole language model is needed"),
    ]  # fmt: skip
    for number, (changes, message) in enumerate(cases):
        folder = tmp_path / str(number)
        written = study(folder, given["tiny"], **changes)
        with pytest.raises(SystemExit) as ended:
            main(["study", str(written), "--dry-run", "--store", str(folder / "store"), "--data", str(folder / "data")])
        printed = " ".join(capsys.readouterr().err.split())
        assert ended.value.code == 2 and re.search(message, printed), printed
        assert not (folder / "store").exists()
        with pytest.raises(UserError, match=message):
            made(written)
        assert not (folder / "store" / "corpora").exists()


def test_two_models_with_one_tokenizer_share_a_study_and_naming_it_changes_nothing(tmp_path: Path) -> None:
    first, second = (save_small_decoder(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second")))
    given = {"initial": {"a": str(first), "b": str(second)}, "models": ["a-clm-20", "b-clm-20", "1m-clm-20"]}
    prepared = made(study(tmp_path, first, **given))
    assert set(prepared.initial) == {"a", "b"} and prepared.initial["a"].key != prepared.initial["b"].key
    assert len(prepared.plan.stages) == 3
    named = made(study(tmp_path / "named", first, **given, tokenizer={"path": str(first)}))
    assert named.corpus.key == made(study(tmp_path / "again", first, **given)).corpus.key
    assert named.initial["b"].key == prepared.initial["b"].key


def test_a_name_of_the_hub_is_settled_at_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own cache stands in for the hub, which is switched off."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--owner--tiny"
    commits = ["a" * 40, "b" * 40]
    for seed, commit in enumerate(commits):
        save_small_decoder(repository / "snapshots" / commit, seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[0])
    path = study(tmp_path, "owner/tiny", models=["tiny-untrained"])
    assert find_prepared(load_study(path), Place(tmp_path / "store", tmp_path / "data")) is None
    prepared = made(path)
    assert (prepared.initial["tiny"].source, prepared.initial["tiny"].commit) == ("owner/tiny", commits[0])
    (repository / "refs" / "main").write_text(commits[1])
    assert made(path).initial == prepared.initial
    assert "base_model: owner/tiny\n" in (export_models(made(path))[0].folder / "README.md").read_text()
    newer = made(study(tmp_path / "newer", f"owner/tiny@{commits[1]}", models=["tiny-untrained"]), tmp_path / "store")
    assert newer.initial["tiny"].key != prepared.initial["tiny"].key
    shutil.rmtree(repository)
    assert made(path).initial == prepared.initial
    with pytest.raises(
        EnvironmentFault,
        match=r"owner/other: no such folder: the model .* is not in the cache, and the Hub is switched off",
    ):
        made(study(tmp_path / "other", "owner/other", models=["tiny-untrained"]))


@pytest.mark.slow
def test_a_whole_study_continues_from_a_folder_on_real_ray(tmp_path: Path) -> None:
    """Pretraining, export, fine-tuning and report; the first loss is that of the folder's weights on the first batch."""
    path = study(tmp_path, tasks=["sst2"], recipe=recipe_of(study(tmp_path / "recipe"), precision="fp32"))
    words = ("--store", tmp_path / "store", "--data", tmp_path / "data")
    code, _, errors = run("pretrain", path, *words, home=tmp_path, timeout=1500)
    assert code == 0, errors
    prepared = made(path)
    folder = tmp_path / "store" / "studies" / "small" / "models"
    start = AutoModelForMaskedLM.from_pretrained(folder / "tiny-untrained").eval()
    name = parse_name("tiny-mlm40-20", prepared.study.sizes)
    batch = next(
        training_batches(
            prepared.corpus.train, prepared.study.recipe, range(1), model=name, tokenizer=prepared.corpus.tokenizer
        )
    )
    assert batch.labels is not None
    with torch.no_grad():
        ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
        expected = cross_entropy(start(ids).logits.flatten(0, 1), labels.flatten())
    curve = [record["loss"] for record in prepared.curve(name) if "loss" in record]
    assert curve[0] == pytest.approx(float(expected), rel=1e-5)
    assert len(curve) == 20 and sum(curve[-5:]) < sum(curve[:5])
    trained = load_file(folder / "tiny-mlm40-20" / "model.safetensors")
    assert not torch.equal(trained["model.norm.weight"], start.state_dict()["model.norm.weight"])
    shutil.rmtree(tmp_path / "decoder")  # from here on the store is enough
    code, _, errors = run(
        "export", path, "tiny-clm-50%-mlm40-20", *words, "--step", "10", "--to", tmp_path / "out", home=tmp_path
    )
    assert code == 0, errors
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "decoder")
    assert type(decoder) is LlamaForCausalLM
    code, _, errors = run("export", path, "tiny-mlm40-20", *words, "--to", tmp_path / "end", home=tmp_path)
    assert code == 0, errors
    assert (tmp_path / "end" / "model.safetensors").read_bytes() == (
        folder / "tiny-mlm40-20" / "model.safetensors"
    ).read_bytes()
    code, _, errors = run("study", path, *words, home=tmp_path, timeout=1500)
    assert code == 0, errors
    page = (tmp_path / "store" / "studies" / "small" / "report.html").read_text()
    assert "tiny-clm-10-mlm40-20" in page and "Continues from decoder." in page and "tiny-clm-50%" not in page
