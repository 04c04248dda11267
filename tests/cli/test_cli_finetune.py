"""`mlmclm finetune`: one cell by the command line is the cell of a sweep."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import ConvBertConfig, ConvBertModel

from mlmclm.finetuning.cell import cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import weights_hash
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import find_space
from mlmclm.tasks.declared_tasks import FOLDER
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_framed_model, save_small_model, small_tokenizer, write_similarities, write_two

Run = Callable[..., tuple[int, str, str]]
SPACE = {
    "tasks": ["sst2", "conll2003"],
    "learning_rates": [1e-3],
    "seeds": {"head": [0], "order": [0, 1], "dropout": [0]},
    "protocol": {"max_steps": 4, "max_length": 48, "stride": 8, "batch_size": 8, "max_evaluation_examples": 20},
    "per_task": {"conll2003": {"max_steps": 3}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, model/, and space.yaml."""
    folder = tmp_path_factory.mktemp("finetune")
    write_two(folder)
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    return folder


@pytest.fixture
def run(run_apart: Run, place: Path, tmp_path: Path) -> Run:
    """Runs `mlmclm finetune` in this process: exit code, output, errors."""
    return lambda *words: run_apart("finetune", *words, "--store", tmp_path / "store", "--data", place / "data")


def sweep_cells(place: Path, store: Path) -> list[Any]:
    """The cells that a sweep of the space would compute."""
    space, folder = find_space(place / "space.yaml"), place / "model"
    data = {
        task: prepare_task(task, folder, space.protocol_for(task), store, place / "data").task_data
        for task in space.tasks
    }
    return expand(space, [SweepModel("m", folder, weights_hash(folder))], data)


def test_a_cell_is_that_of_a_sweep_to_the_last_bit_and_is_found_by_it(place: Path, run: Run, tmp_path: Path) -> None:
    words = (place / "model", "conll2003", "--lr", "1e-3", "--space", place / "space.yaml", "--order-seed", "1")
    code, output, errors = run(*words, "--json")
    assert code == 0, errors
    found = json.loads(output)
    cells = sweep_cells(place, tmp_path / "store")
    (cell,) = (cell for cell in cells if cell.task == "conll2003" and cell_key(cell) == found["key"])
    results_store = ResultsStore(tmp_path / "store")
    assert [left for left in cells if left not in results_store.missing(cells)] == [cell]
    computed = run_cell(cell, store=tmp_path / "store", data_root=place / "data")
    for name in ("scores", "curve", "streams", "seed", "steps", "tokens"):
        assert found[name] == computed[name], name
    assert found["seed"] == {"head": 0, "order": 1, "dropout": 0}
    assert (found["computed"], found["file"], found["steps"]) == (True, str(results_store.path(found["key"])), 3)
    assert found["examples_file"] == str(results_store.examples_path(found["key"]))
    assert results_store.examples(found).rows == 20
    code, again, _ = run(*words, "--json")
    assert (code, json.loads(again)) == (0, {**found, "computed": False})


def test_what_a_sweep_has_computed_is_printed_and_not_computed_again(
    place: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = next(cell for cell in sweep_cells(place, tmp_path / "store") if cell.task == "sst2" and cell.seed == 0)
    result = run_cell(cell, store=tmp_path / "store", data_root=place / "data")
    ResultsStore(tmp_path / "store").write(result)
    monkeypatch.setattr("mlmclm.finetuning.run.run_cell", None)
    code, output, errors = run(place / "model", "sst2", "--lr", "0.001", "--space", place / "space.yaml")
    assert code == 0, errors
    assert f"{result['scores']['test']['accuracy']:.4f}" in output
    assert f"{result['key']}.json" in output
    assert "found in the store" in output


def test_other_metrics_find_the_same_result_and_mark_another_score(place: Path, run: Run) -> None:
    found = []
    for metrics in ("standard", "study"):
        space = place / f"{metrics}.yaml"
        space.write_text(yaml.safe_dump({**SPACE, "metrics": metrics}))
        code, output, errors = run(place / "model", "conll2003", "--lr", "1e-3", "--space", space, "--json")
        assert code == 0, errors
        found.append(json.loads(output))
    assert [result["metric"] for result in found] == ["f1", "study.f1"]
    assert [result["computed"] for result in found] == [True, False]
    assert found[0]["key"] == found[1]["key"]
    assert {"f1", "study.f1"} <= set(found[0]["scores"]["test"])


def test_a_dry_run_shows_the_key_and_trains_nothing(place: Path, run: Run, tmp_path: Path) -> None:
    words = (place / "model", "sst2", "--lr", "1e-3", "--seed", "3", "--space", place / "space.yaml", "--dry-run")
    code, output, errors = run(*words, "--json")
    assert code == 0, errors
    plan = json.loads(output)
    assert not (tmp_path / "store" / "cells").exists()
    assert not (tmp_path / "store" / "prepared").exists()
    assert (plan["seed"], plan["there"], plan["protocol"]["max_steps"]) == (3, False, 4)
    code, output, _ = run(*words)
    assert plan["key"] in output
    assert "protocol.max_steps: 4" in output
    code, output, errors = run(*words[:-1], "--json")
    assert code == 0, errors
    assert json.loads(output)["key"] == plan["key"]


def test_direction_pooling_and_protocol_are_the_cells_own(place: Path, run: Run) -> None:
    def plan(*words: str, model: str = "model") -> dict[str, Any]:
        code, output, errors = run(place / model, "sst2", "--lr", "1e-3", "--dry-run", "--json", *words)
        assert code == 0, errors
        return dict(json.loads(output))

    own = place / "short.yaml"
    own.write_text("protocol: {max_steps: 5, stride: 8, length_share: 0.5}\n")
    plain = plan("--protocol", str(own))
    assert (plain["protocol"]["max_length"], plain["protocol"]["max_steps"]) == (64, 5)  # half of 128 positions
    assert (
        plan("--protocol", str(own), "--set", "attention=bidirectional", "--set", "pooling=mean")["key"] == plain["key"]
    )
    framed = ("--set", "special_tokens=tokenizer", "--set", "pooling=bos")
    causal, last = ("--set", "attention=causal"), ("--set", "pooling=last")
    others = [causal, last, (*causal, *last)]
    plans = [plan("--protocol", str(own), *words) for words in others]
    assert len({plain["key"], *(each["key"] for each in plans)}) == 4
    assert (plans[2]["protocol"]["attention"], plans[2]["protocol"]["pooling"]) == ("causal", "last")
    with_bos = save_framed_model(place / "framed").name
    keys = {plan("--protocol", str(own), *words, model=with_bos)["key"] for words in ((), framed)}
    assert len(keys) == 2
    code, _, errors = run(place / "model", "sst2", "--lr", "1e-3", "--protocol", str(own), *framed, "--dry-run")
    assert code == 2 and "adds no token to a text" in " ".join(errors.split())
    code, _, errors = run(place / "model", "sst2", "--lr", "1e-3", "--set", "pooling=bos")
    assert code == 2 and "no token is there to pool; use special_tokens: tokenizer" in " ".join(errors.split())


def test_a_pair_s_cell_is_that_of_a_sweep_and_another_one_only_where_the_longer_text_is_cut(
    place: Path, run: Run, tmp_path: Path
) -> None:
    write_similarities(place / "data")
    found = {}
    for length, cut in itertools.product((28, 100), ("longest_first", "joined")):
        space = place / "pairs.yaml"
        protocol = {"max_steps": 2, "max_length": length, "stride": 4, "pair_truncation": cut}
        space.write_text(
            yaml.safe_dump({"tasks": ["stsb"], "learning_rates": [1e-3], "seeds": [0], "protocol": protocol})
        )
        words = (place / "model", "stsb", "--lr", "1e-3", "--space", space, "--json")
        code, output, errors = run(*words, "--dry-run")
        assert code == 0, errors
        key = json.loads(output)["key"]
        folder, loaded = place / "model", find_space(space)
        made = prepare_task("stsb", folder, loaded.protocol_for("stsb"), tmp_path / "store", place / "data")
        recut = ["stsb"] if made.recut else []
        (cell,) = expand(loaded, [SweepModel("m", folder, weights_hash(folder))], {"stsb": made.task_data}, recut=recut)
        assert cell_key(cell) == key
        code, output, errors = run(*words)
        assert code == 0, errors
        result = json.loads(output)
        assert result["key"] == key
        assert result["protocol"].get("pair_truncation") == ("longest_first" if recut else None)
        assert Protocol.of_result(result["protocol"]).cuts_longest == bool(recut)
        found[length, cut] = key
    assert found[100, "longest_first"] == found[100, "joined"]
    assert len(set(found.values())) == 3


def test_a_point_of_a_grid_is_chosen_by_its_settings_and_is_the_sweep_s_cell(
    place: Path, run: Run, tmp_path: Path
) -> None:
    space = place / "grid.yaml"
    space.write_text(yaml.safe_dump({**SPACE, "grid": {"batch_size": [4, 8], "weight_decay": ["1e-6"]}}))
    words = (place / "model", "sst2", "--lr", "1e-3", "--space", space, "--dry-run", "--json")
    code, _, errors = run(*words, "--set", "weight_decay=1e-6")
    assert code == 2
    assert "task sst2 has several values of batch_size (4, 8): choose one with --set batch_size=VALUE" in " ".join(
        errors.split()
    )
    code, output, errors = run(*words, "--set", "weight_decay=1e-6", "--set", "batch_size=8")
    assert code == 0, errors
    folder = place / "model"
    data = prepare_task("sst2", folder, find_space(space).protocol_for("sst2"), tmp_path / "store", place / "data")
    cells = expand(
        find_space(space), [SweepModel("m", folder, weights_hash(folder))], {"sst2": data.task_data, "conll2003": ""}
    )
    found = [cell for cell in cells if cell_key(cell) == json.loads(output)["key"]]
    assert [(cell.task, cell.setting) for cell in found] == [("sst2", "batch size 8, weight decay 1e-06")]


def test_a_cell_starts_from_another_s_weights_which_are_kept_once(place: Path, run: Run, tmp_path: Path) -> None:
    space = place / "start.yaml"
    space.write_text(yaml.safe_dump({**SPACE, "start_from": {"conll2003": "sst2"}}))

    def cell(task: str, *words: str) -> dict[str, Any]:
        code, output, errors = run(place / "model", task, "--lr", "1e-3", "--space", space, "--json", *words)
        assert code == 0, errors
        return dict(json.loads(output))

    code, _, errors = run(place / "model", "conll2003", "--lr", "1e-3", "--space", space)
    assert code == 2
    assert "the model's best sst2 cell, which a sweep chooses: give --start-from KEY" in " ".join(errors.split())
    source = cell("sst2")
    plain, started = cell("conll2003", "--start-from", "none"), cell("conll2003", "--start-from", source["key"])
    assert started["start"] == {"cell": source["key"], "task": "sst2"}
    assert started["key"] != plain["key"]
    assert started["curve"] != plain["curve"]
    (kept,) = (tmp_path / "store" / "tuned").glob("*/*/result.json")
    assert json.loads(kept.read_text())["scores"] == source["scores"]
    when = kept.stat().st_mtime_ns
    assert cell("conll2003", "--start-from", source["key"], "--seed", "1")["start"] == started["start"]
    assert kept.stat().st_mtime_ns == when
    for key, message in (("0" * 64, "has no result of that key"), (started["key"], "itself starts from another cell")):
        code, _, errors = run(place / "model", "conll2003", "--lr", "1e-3", "--space", space, "--start-from", key)
        assert code == 2
        assert message in " ".join(errors.split())


def test_a_model_is_found_by_the_name_that_a_study_gave_it(place: Path, run: Run, tmp_path: Path) -> None:
    other = save_small_model(tmp_path / "other", seed=1)
    for study, name, folder in (("a", "1m-clm-30", place / "model"), ("b", "1m-clm-30", other), ("b", "only", other)):
        link = tmp_path / "store" / "studies" / study / "models" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder, target_is_directory=True)
    words = ("sst2", "--lr", "1e-3", "--space", place / "space.yaml", "--dry-run", "--json")
    assert json.loads(run("only", *words)[1])["weights"] == weights_hash(other)
    found = json.loads(run("a/1m-clm-30", *words)[1])
    assert (found["model"], found["weights"]) == ("1m-clm-30", weights_hash(place / "model"))
    code, _, errors = run("1m-clm-30", *words)
    assert code == 2
    assert "name one of a/1m-clm-30, b/1m-clm-30" in " ".join(errors.split())
    code, _, errors = run("1m-clm-3", *words)
    assert code == 2
    assert "Did you mean '1m-clm-30'?" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sst2", "--lr", "2"), "--lr 2: a learning rate is between 0 and 1"),
        (("sst3", "--lr", "1e-3"), "unknown task 'sst3'. Did you mean 'sst2'?"),
        (("sst2", "--lr", "1e-3", "--protocol", "stdy"), "unknown protocol 'stdy'. Did you mean 'study'?"),
        (("sst2", "--lr", "1e-3", "--protocol", "study", "--space", "paper"), "--protocol and --space"),
        (("sst2", "--lr", "1e-3", "--space", "paper", "--set", "pooling=max"), "options: pooling"),
        (("sst2", "--lr", "1e-3", "--set", "epochs"), "--set epochs: write KEY=VALUE"),
        (("sst2", "--lr", "1e-3", "--set", "epoch=1"), "unknown key 'epoch'. Did you mean 'epochs'?"),
    ],
)
def test_a_mistake_is_one_message(place: Path, run: Run, words: tuple[str, ...], message: str) -> None:
    code, _, errors = run(place / "model", *words)
    assert code == 2, errors
    assert message in " ".join(errors.split())
    assert "Traceback" not in errors


def test_a_model_that_cannot_attend_in_both_directions_is_refused_before_training(
    place: Path, run: Run, tmp_path: Path
) -> None:
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.3,
    }
    small_tokenizer().save_pretrained(tmp_path / "convbert")
    ConvBertModel(ConvBertConfig(vocab_size=400, **shape)).save_pretrained(tmp_path / "convbert")
    code, _, errors = run(tmp_path / "convbert", "sst2", "--lr", "1e-3", "--space", place / "space.yaml")
    assert code == 2, errors
    assert "the architecture 'convbert' cannot be fine-tuned: its attention" in " ".join(errors.split())
    assert "Traceback" not in errors
    assert not (tmp_path / "store" / "cells").exists()


def test_a_task_of_the_user_s_own_is_found_by_option_and_by_environment(
    place: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "own.yaml").write_text((FOLDER / "sst2.yaml").read_text().replace("name: sst2", "name: own"))
    words = (place / "model", "own", "--lr", "1e-3", "--set", "max_steps=2", "--set", "max_length=32", "--json")
    assert run(*words)[0] == 2
    code, output, errors = run(*words, "--task-dir", folder)
    assert code == 0, errors
    monkeypatch.setenv("MLMCLM_TASK_DIR", str(folder))
    code, again, errors = run(*words)
    assert (code, json.loads(again)) == (0, {**json.loads(output), "computed": False}), errors
