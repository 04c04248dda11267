"""`mlmclm export --revisions`: a repository of the Hub's cache that transformers reads by its tags, without a network."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from mlmclm.models.hub import push
from mlmclm.models.hub_cache import CachedRepository
from mlmclm.pretraining import states
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import find_prepared
from mlmclm.studies.study_file import load_study
from small_hub import Hub, commit

Run = Callable[..., tuple[int, str, str]]
CAUSAL, MASKED = "1m-clm-30", "1m-clm-10-mlm40-30"
STEPS = (0, 10, 20, 30)


@pytest.fixture
def export(finished_study: Any, run_apart: Run) -> Callable[..., dict[str, Any]]:
    """Exports a model's revisions; returns what the command printed, and what it said on standard error."""

    def call(model: str, to: Path, *more: str | Path, study: Path | None = None, store: Path | None = None) -> Any:
        words = ("--store", store or finished_study.store, "--data", finished_study.study.parent / "data", "--json")
        code, output, errors = run_apart(
            "export", study or finished_study.study, model, "--revisions", "--to", to, *words, *more
        )
        assert code == 0, errors
        return {**json.loads(output), "errors": " ".join(errors.split())}

    return call


def expected(finished_study: Any, model: str, step: int) -> dict[str, torch.Tensor]:
    """The weights of a model at a step, as the store has them."""
    place = Place(finished_study.store, finished_study.study.parent / "data")
    made = find_prepared(load_study(finished_study.study), place)
    assert made is not None
    state = made.plan.targets[list(map(str, made.plan.models)).index(model)].at(step)
    folder = states.weights_folder(finished_study.store, state.key(made.fingerprint))
    tensors = load_file(folder / "state.safetensors")
    assert json.loads((folder / "step.json").read_text()) == {"step": step}
    return {name[2:]: value for name, value in tensors.items() if name.startswith("w/")}


def same(model: Any, weights: dict[str, torch.Tensor]) -> bool:
    found = model.state_dict()
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_each_tag_loads_with_the_weights_of_its_step(
    finished_study: Any, tmp_path: Path, export: Callable[..., Any]
) -> None:
    cache = tmp_path / "cache"
    made = export(MASKED, cache, "--repository", "me/encoder")
    tags = [f"step{step}" for step in STEPS]
    assert (made["repositories"], made["tags"], made["written"], made["missing"]) == (["me/encoder"], tags, tags, [])
    made = export(CAUSAL, cache, "--repository", "me/decoder")
    assert made["repositories"] == ["me/decoder", "me/decoder-encoder"]
    seen = set()
    for tag, step in [*zip(tags, STEPS, strict=True), (None, 30)]:
        where: dict[str, Any] = {"cache_dir": cache, **({} if tag is None else {"revision": tag})}
        masked, causal = expected(finished_study, MASKED, step), expected(finished_study, CAUSAL, step)
        assert same(AutoModelForMaskedLM.from_pretrained("me/encoder", **where), masked), tag
        assert same(AutoModelForMaskedLM.from_pretrained("me/decoder-encoder", **where), causal), tag
        assert same(AutoModelForCausalLM.from_pretrained("me/decoder", **where), causal), tag
        seen.add(causal["model.norm.weight"].numpy().tobytes())
    assert len(seen) == len(STEPS), "the steps differ"
    untrained = finished_study.store / "studies" / "small" / "models" / "1m-untrained"
    # For a path transformers ignores `revision`, as docs/models.md says.
    found = AutoModelForMaskedLM.from_pretrained(untrained, revision="step7")
    assert same(found, expected(finished_study, CAUSAL, 0))
    ids = {}
    for name in ("me/decoder", "me/encoder"):
        tokenizer = AutoTokenizer.from_pretrained(name, revision="step0", cache_dir=cache)
        ids[name] = tokenizer("lovely").input_ids
    assert [*ids["me/decoder"], tokenizer.eos_token_id] == ids["me/encoder"]
    with pytest.raises(OSError, match="couldn't find them in the cached files"):
        AutoModel.from_pretrained("me/encoder", revision="step7", cache_dir=cache)
    folder = (cache / "models--me--encoder" / "snapshots").iterdir()
    assert all(re.fullmatch("[0-9a-f]{40}", path.name) for path in folder)


def test_sentence_transformers_and_the_harness_load_a_tag_too(
    finished_study: Any, tmp_path: Path, export: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'mlmclm[evaluation]'")
    library = pytest.importorskip("sentence_transformers", reason="pip install 'mlmclm[evaluation]'")
    from lm_eval.models.huggingface import HFLM

    for model, name in ((MASKED, "me/encoder"), (CAUSAL, "me/decoder")):
        export(model, tmp_path, "--repository", name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))  # the harness passes no folder on
    for tag, step in (("step10", 10), ("main", 30)):
        sentences = library.SentenceTransformer("me/encoder", revision=tag, cache_folder=str(tmp_path), device="cpu")
        masked, causal = expected(finished_study, MASKED, step), expected(finished_study, CAUSAL, step)
        trunk = {name.removeprefix("model."): value for name, value in masked.items() if name.startswith("model.")}
        assert same(sentences[0].auto_model, trunk)
        harness = HFLM(pretrained="me/decoder", revision=tag, device="cpu", dtype="float32")
        assert same(harness.model, causal)
        assert harness.tokenizer("lovely").input_ids == AutoTokenizer.from_pretrained("me/decoder")("lovely").input_ids


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def test_the_second_time_nothing_is_written_and_what_is_gone_or_damaged_is_written_again(
    tmp_path: Path, export: Callable[..., Any]
) -> None:
    cache = tmp_path / "cache"
    export(CAUSAL, cache)
    before, repository = listing(cache), cache / f"models--mlmclm--{CAUSAL}"
    assert export(CAUSAL, cache)["written"] == [] and listing(cache) == before
    assert {path.name for path in cache.iterdir()} == {repository.name, f"{repository.name}-encoder"}
    # As if the first export had been interrupted.
    commits = {tag: (repository / "refs" / tag).read_text() for tag in ("step10", "step20", "main", "step30")}
    assert commits["main"] == commits["step30"]
    (repository / "refs" / "step10").unlink()
    shutil.rmtree(repository / "snapshots" / commits["step20"])
    (repository / "snapshots" / commits["main"] / "model.safetensors").resolve().write_bytes(b"short")
    assert export(CAUSAL, cache)["written"] == ["step10", "step20", "step30"]
    assert listing(cache).keys() == before.keys()
    assert {tag: (repository / "refs" / tag).read_text() for tag in commits} == commits, "a commit is its content"
    assert export(CAUSAL, cache)["written"] == []
    (repository / "snapshots" / commits["step20"] / "config.json").unlink()
    assert export(CAUSAL, cache)["written"] == ["step20"]
    assert export(CAUSAL, cache)["written"] == [] and listing(cache).keys() == before.keys()
    model = AutoModelForCausalLM.from_pretrained(f"mlmclm/{CAUSAL}", cache_dir=cache)
    assert model.config.model_type == "llama"


def test_the_hub_gets_a_tag_for_each_revision_and_only_what_it_lacks(
    finished_study: Any, tmp_path: Path, export: Callable[..., Any], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    cache, tags = tmp_path / "cache", [f"step{step}" for step in STEPS]
    words = ("--push-to-hub", "me/decoder")
    made = export(CAUSAL, cache, *words, "--dry-run")
    assert made["hub"] == {"me/decoder": tags, "me/decoder-encoder": tags} and not hub.asked
    assert "would upload to me/decoder" in made["errors"]
    hub.commits_left = 3  # the hub fails while the revisions are uploaded
    with pytest.raises(AssertionError, match="the hub failed"):
        export(CAUSAL, cache, *words)
    assert list(hub.repositories["me/decoder"].tags) == tags[:3] and hub.repositories["me/decoder"].files("main") == {}
    hub.commits_left = 100
    assert export(CAUSAL, cache, *words)["hub"] == {"me/decoder": tags[3:], "me/decoder-encoder": tags}
    for name, repository in hub.repositories.items():
        cached = CachedRepository(cache, name)
        for tag in (*tags, "main"):
            folder = cached.snapshot(tag)
            assert folder is not None
            assert repository.files(tag) == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert list(repository.tags) == tags
    hub.repositories["me/decoder"].branches["main"] = commit(0)  # as if it had been interrupted before the last commit
    export(CAUSAL, cache, *words)
    assert "model.safetensors" in hub.repositories["me/decoder"].files("main")
    before = len(hub.asked)
    assert export(CAUSAL, cache, *words)["hub"] == {"me/decoder": [], "me/decoder-encoder": []}
    assert not [path for path, _ in hub.asked[before:] if "/commit/" in path]
    with pytest.raises(AssertionError, match=r"its revision 'step\d+' has the weights of another model or training"):
        export(MASKED, tmp_path / "other", *words)
    with pytest.raises(AssertionError, match="leave one of them out"):
        export(MASKED, tmp_path / "other", *words, "--repository", "me/other")


def test_a_repository_of_another_model_stays_as_it_is_and_tags_have_no_files_of_main(
    finished_study: Any, tmp_path: Path, export: Callable[..., Any], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    models = finished_study.store / "studies" / load_study(finished_study.study).name / "models"
    other, own = models / CAUSAL, models / MASKED
    push(other, "me/encoder", "another model")
    before = dict(hub.repositories["me/encoder"].branches)
    with pytest.raises(AssertionError, match="its branch 'main' has the weights of another model, or of a later step"):
        export(MASKED, tmp_path / "cache", "--push-to-hub", "me/encoder")
    assert hub.repositories["me/encoder"].branches == before
    assert not hub.repositories["me/encoder"].tags
    hub.repositories.clear()
    (tmp_path / "pushed").mkdir()
    (tmp_path / "pushed" / "notes.txt").write_text("beside the model")
    push(own, "me/encoder", "the model itself")
    push(tmp_path / "pushed", "me/encoder", "a file of the user's")
    assert export(MASKED, tmp_path / "cache", "--push-to-hub", "me/encoder")["hub"]["me/encoder"]
    there = hub.repositories["me/encoder"]
    assert all("notes.txt" not in there.files(tag) for tag in there.tags) and "notes.txt" in there.files("main")
    assert there.files("main").items() >= there.files("step30").items(), "the notes too"
    # Encoder and decoder have the same weights, and what says which one it is.
    push(other, "me/decoder", "the model as an encoder, with its decoder in a folder")
    export(CAUSAL, tmp_path / "cache", "--push-to-hub", "me/decoder")
    there = hub.repositories["me/decoder"]
    assert json.loads(there.files("main")["config.json"])["architectures"] == ["LlamaForCausalLM"]
    assert there.files("main").items() >= there.files("step30").items()
    assert not any("decoder/" in path for tag in there.tags for path in there.files(tag))
    hub.put("me/pickled", {"pytorch_model.bin": b"others"})
    with pytest.raises(AssertionError, match="its branch 'main' has the weights of another model"):
        export(CAUSAL, tmp_path / "cache", "--push-to-hub", "me/pickled")


def test_revisions_that_were_not_kept_are_named(
    finished_study: Any, tmp_path: Path, export: Callable[..., Any]
) -> None:
    study = yaml.safe_load(finished_study.study.read_text())
    study["recipe"]["revisions_every"] = 4
    study["card"] = {"licence": "apache-2.0", "datasets": ["me/prose"], "citation": "@misc{me}"}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    made = export(MASKED, tmp_path / "cache", study=tmp_path / "study.yaml")
    assert made["tags"] == ["step0", "step20", "step30"]
    assert made["missing"] == [f"step{step}" for step in (4, 8, 12, 16, 24, 28)]
    assert "6 of its revisions are not in the store: step4, step8, step12, step16, step24, step28." in made["errors"]
    assert f"`mlmclm pretrain {tmp_path / 'study.yaml'} --store NEW`" in made["errors"]
    repository = tmp_path / "cache" / f"models--mlmclm--{MASKED}"
    card = (repository / "snapshots" / (repository / "refs" / "main").read_text() / "README.md").read_text()
    matter = yaml.safe_load(card.split("---\n")[1])
    assert matter["license"] == "apache-2.0" and matter["datasets"] == ["me/prose"]
    assert "Tags: `step0`, `step20`, `step30`. Not kept: step4, step8" in card
    assert "@misc{me}" in card and f"- {CAUSAL}\n" in card and f"- {MASKED}\n" not in card


def test_all_code_of_each_card_runs_and_prints_what_the_model_makes_of_a_text(
    tmp_path: Path, export: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    export(CAUSAL, tmp_path)
    export(MASKED, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cards = sorted(tmp_path.glob("models--*/snapshots/*/README.md"))
    assert len(cards) == 3 * len(STEPS)
    classes = set()
    for card in cards:
        blocks = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
        assert blocks
        own = load_file(card.parent / "model.safetensors")["model.norm.weight"]
        for block in blocks:
            scope: dict[str, Any] = {}
            with redirect_stdout(io.StringIO()) as printed:
                exec(block, scope)
            assert printed.getvalue().strip()
            classes.add(type(scope["model"]).__name__)
            assert torch.equal(scope["model"].base_model.norm.weight, own), "not the card's own revision"
    assert classes == {"LlamaForCausalLM", "EuroBertForMaskedLM", "EuroBertModel"}


def test_revisions_by_tokens_are_those_of_the_steps_that_reach_them(
    finished_study: Any, tmp_path: Path, export: Callable[..., Any]
) -> None:
    study = yaml.safe_load(finished_study.study.read_text())
    study["recipe"] |= {"revisions_every": None, "revisions_every_tokens": 10 * 8 * 32}
    file = tmp_path / "tokens.yaml"
    file.write_text(yaml.safe_dump(study))
    made = export(CAUSAL, tmp_path / "cache", study=file)
    assert made["tags"] == [f"step{step}" for step in STEPS] and not made["missing"]


def test_mistakes_are_said(finished_study: Any, tmp_path: Path, run_apart: Run) -> None:
    study = yaml.safe_load(finished_study.study.read_text())

    def changed(name: str, **recipe: Any) -> Path:
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(study | {"recipe": study["recipe"] | recipe}))
        return file

    kept = tmp_path / "kept"
    own = finished_study.study
    places = ("--store", finished_study.store, "--data", own.parent / "data")
    assert run_apart("export", own, CAUSAL, *places, "--revisions", "--to", kept)[0] == 0
    before = listing(kept)
    for file, model, more, said in (
        (changed("zero", revisions_every=0), CAUSAL, (), "recipe.revisions_every"),
        (changed("far", revisions_every=31), CAUSAL, (), "revisions_every 31: longer than any model's training; allowed: 1 to 30"),
        (changed("none", revisions_every=None), CAUSAL, (), "neither recipe.revisions_every nor revisions_every_tokens is set"),
        (changed("tokens", revisions_every_tokens=9), CAUSAL, (), "revisions_every and revisions_every_tokens: give one"),
        (
            changed("much", revisions_every=None, revisions_every_tokens=10_000),
            CAUSAL,
            (),
            "revisions_every_tokens 10000: more than any model sees; allowed: 1 to 7680",
        ),
        (changed("other", batch=4), CAUSAL, (), "no intact state of model"),
        (own, "1m-clm-3O", (), "unknown model '1m-clm-3O'. Did you mean '1m-clm-30'?"),
        (own, "1m-untrained", (), "an untrained model has no state"),
        (own, CAUSAL, ("--step", "5"), "leave out --step"),
        (own, CAUSAL, ("--repository", "name"), "--repository name: expected OWNER/NAME"),
        (own, CAUSAL, ("--repository", "a/b/c"), "--repository a/b/c: Repo id must be in the form"),
        (own, CAUSAL, ("--repository", "../b"), "--repository ../b: "),
        (own, CAUSAL, ("--repository", "a/b--c"), "--repository a/b--c: Cannot have -- or .."),
        (own, MASKED, ("--repository", f"mlmclm/{CAUSAL}"), "has the weights of another model"),
    ):  # fmt: skip
        code, _, errors = run_apart("export", file, model, "--revisions", *places, "--to", kept, *more)
        assert code == 2 and said in " ".join(errors.split()), (said, errors)
    code, _, errors = run_apart("export", own, CAUSAL, *places, "--to", tmp_path / "out", "--repository", "a/b")
    assert code == 2 and "--repository names the repository of --revisions" in errors
    assert listing(kept) == before and not (tmp_path / "out").exists()
