"""`mlmclm export`: any state as a folder that transformers loads; the hub gets what was announced."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from small_hub import Hub, commit
from small_study import run as run_process
from small_study import start, write_study

Run = Callable[..., tuple[int, str, str]]

NAME = "1m-clm-10-mlm40-30"


@pytest.fixture
def run(run_apart: Run) -> Run:
    return run_apart


@pytest.fixture
def store(finished_study: Any) -> Path:
    """A store with the study's models."""
    return finished_study.store


def weights(store: Path, step: int, segments: int) -> dict[str, torch.Tensor]:
    """Return the weights of the only state of a store with this step and number of segments."""
    found = []
    for path in store.glob("states/*/state.json"):
        description = json.loads(path.read_text())
        if description["step"] == step and len(description["legs"]) == segments:
            found.append(path.parent / "state.safetensors")
    (file,) = found
    return {key.removeprefix("w/"): value for key, value in load_file(file).items() if key.startswith("w/")}


def test_any_state_is_exported_as_an_encoder_and_after_a_causal_step_as_a_decoder(
    store: Path, tmp_path: Path, run: Run
) -> None:
    words = ("export", "small", NAME, "--store", store, "--to")
    assert run(*words, tmp_path / "end")[0] == 0
    code, output, errors = run(*words, tmp_path / "trunk", "--step", "10", "--json")
    assert code == 0, errors
    assert json.loads(output)["model"] == f"{NAME}-10"
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "trunk" / "decoder")
    trunk = weights(store, 10, 1)
    assert all(torch.equal(value, trunk[key]) for key, value in decoder.state_dict().items())
    masked = AutoModelForMaskedLM.from_pretrained(tmp_path / "end")
    end = weights(store, 30, 3)
    assert all(torch.equal(value, end[key]) for key, value in masked.state_dict().items())
    assert not (tmp_path / "end" / "decoder").exists()
    card = (tmp_path / "trunk" / "README.md").read_text()
    assert "steps 0 to 10: causal (CLM)" in card and "training, step 10 (last)" in card and "| source | prose |" in card


def test_a_study_file_says_which_store_and_recipe(study: Path, store: Path, tmp_path: Path, run: Run) -> None:
    words = ("export", study, NAME, "--store", store, "--data", study.parent / "data", "--to", tmp_path / "out")
    code, _, errors = run(*words)
    assert code == 0, errors
    code, _, errors = run("export", "small", NAME, "--store", store, "--to", tmp_path / "by-name")
    assert code == 0, errors
    assert (tmp_path / "by-name" / "README.md").read_text() == (tmp_path / "out" / "README.md").read_text()
    exported = (store / "studies" / "small" / "models" / NAME).resolve()
    # The card of the end of pretraining, with the scores that came later.
    card, before = ((folder / "README.md").read_text() for folder in (tmp_path / "out", exported))
    assert set(before.splitlines()) < set(card.splitlines())
    assert "model-index:" in card and "| sst2 | " in card and "model-index:" not in before
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    code, _, errors = run(*words)
    assert code == 2 and "exists and is not empty" in errors


def test_mistakes_are_said(study: Path, store: Path, tmp_path: Path, run: Run) -> None:
    damaged = tmp_path / "store"
    shutil.copytree(store, damaged, symlinks=True)
    for path in damaged.glob("states/*/state.safetensors"):
        os.truncate(path, 1000)
    for words, expected in (
        (
            ("small", NAME, "--step", "7", "--store", store),
            f"no intact state of model '{NAME}' at step 7; there are steps 10, 30",
        ),
        (
            ("small", "1m-clm-30-7", "--store", store),
            "no intact state of model '1m-clm-30-7' at step 7; train it with",
        ),
        (
            (study, "1m-clm-999", "--store", store),
            "study.yaml: unknown model '1m-clm-999'. Did you mean '1m-clm-30'? Allowed: ",
        ),
        (("small", "1m-clm-999-10", "--store", store), "unknown model '1m-clm-999-10'. Did you mean '1m-clm-30'?"),
        (("small", NAME, "--store", damaged), "state.safetensors has 1,000 bytes instead of"),
        (("small", NAME, "--dry-run", "--store", store), "--dry-run says what --push-to-hub would upload"),
        (("small", NAME, "--push-to-hub", "a/b/c", "--dry-run", "--store", store), "--push-to-hub a/b/c: Repo id"),
        (
            ("small", NAME, "--step", "10", "--push-to-hub", f"a/{'b' * 90}", "--dry-run", "--store", store),
            f"--push-to-hub a/{'b' * 90}-encoder: Repo id",
        ),
        (("small", NAME, "--push-to-hub", "a/b", "--store", store), "unset it and run again"),
    ):
        code, _, errors = run("export", *words, "--to", tmp_path / "out")
        assert code == 2 and expected in " ".join(errors.split()), errors
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_latest_checkpoint_of_a_stage_that_isn_t_finished_is_exported(study: Path, tmp_path: Path) -> None:
    store, long = tmp_path / "store", write_study(tmp_path / "long", models=["1m-mlm40-3k"], baseline=None)
    driver = start("pretrain", long, "--store", store, "--data", long.parent / "data", home=tmp_path)
    try:
        deadline = time.monotonic() + 200
        while len(list(store.glob("runs/*/ray_train/*/checkpoint_*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        children = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        psutil.wait_procs(children, timeout=1500)
    words = (
        "export",
        long,
        "1m-mlm40-3k",
        "--store",
        store,
        "--data",
        long.parent / "data",
        "--to",
        tmp_path / "out",
        "--json",
    )
    code, _, errors = run_process(*words, home=tmp_path)
    assert code == 2 and "no intact state of model '1m-mlm40-3k' at step 3000; there are steps " in errors
    step = re.split(r"[ ,;]+", errors.partition("there are steps ")[2].partition(";")[0])[-1]
    code, output, errors = run_process(*words, "--step", step, home=tmp_path)
    assert code == 0, errors
    made = json.loads(output)
    assert made["step"] == int(step) and made["step"] % 5 == 0
    assert made["model"] == f"1m-mlm40-3k-{made['step']}"
    assert f"steps 0 to {made['step']}: masked at 40 % (MLM)" in (tmp_path / "out" / "README.md").read_text()


def test_the_hub_gets_exactly_what_the_dry_run_says(
    store: Path,
    tmp_path: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    words = ("export", "small", NAME, "--store", store, "--step", "10", "--push-to-hub", "me/model", "--json")
    code, output, errors = run(*words, "--to", tmp_path / "dry", "--dry-run")
    assert code == 0, errors
    assert not hub.asked and "would upload to me/model on" in errors and "would upload to me/model-encoder on" in errors
    said = json.loads(output)["hub"]
    code, output, errors = run(*words, "--to", tmp_path / "real")
    assert code == 0, errors
    made = json.loads(output)["hub"]
    assert made == [{**each, "commit": f"{hub.address}/{each['repository']}/commit/{commit(1)}"} for each in said]
    created = [asked for path, asked in hub.asked if path.endswith("/repos/create")]
    assert all(each.get("private") is True or each.get("visibility") == "private" for each in created)
    trunk, kinds = weights(store, 10, 1), {"me/model": "decoder", "me/model-encoder": "."}
    assert [each["repository"] for each in said] == list(kinds) == list(hub.repositories)
    for each in said:
        files = hub.repositories[each["repository"]].files("main")
        folder = tmp_path / "real" / kinds[each["repository"]]
        assert files == {name: (folder / name).read_bytes() for name in each["files"]}
        assert {name: len(content) for name, content in files.items()} == each["files"]
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
        assert f'name = "{each["repository"]}"' in files["README.md"].decode()
        loaded = tmp_path / "loaded" / each["repository"]  # as it is downloaded
        loaded.mkdir(parents=True)
        for name, content in files.items():
            (loaded / name).write_bytes(content)
        kind = AutoModelForCausalLM if each["repository"] == "me/model" else AutoModelForMaskedLM
        assert all(torch.equal(value, trunk[key]) for key, value in kind.from_pretrained(loaded).state_dict().items())
    # An encoder that is no decoder has one repository.
    code, output, errors = run(
        "export", "small", NAME, "--store", store, "--push-to-hub", "me/masked", "--json", "--to", tmp_path / "end"
    )
    assert code == 0, errors
    assert [each["repository"] for each in json.loads(output)["hub"]] == ["me/masked"]


def test_without_a_token_or_an_answer_it_is_said_what_to_do(
    store: Path, tmp_path: Path, at_address: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    at_address("http://127.0.0.1:9")
    words = ("export", "small", NAME, "--store", store, "--push-to-hub", "me/model", "--to")
    code, _, errors = run(*words, tmp_path / "out")
    assert code == 2 and "hf auth login" in errors and not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    code, _, errors = run(*words, tmp_path / "out")
    assert code == 1 and "cannot be reached" in errors and "hf upload me/model" in errors
