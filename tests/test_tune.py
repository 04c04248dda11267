"""`mlmclm.tune`: cells as trials of any `tune.Tuner` are those of a sweep."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pytest
import ray
import yaml
from ray import tune
from ray.air.integrations.mlflow import MLflowLoggerCallback
from ray.tune.schedulers import PopulationBasedTraining

import mlmclm
import sweep_cells
from mlmclm.cli.main import main
from mlmclm.cluster.placement import Cluster
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.storage.checksums import CHECKSUM
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.trial import SWEEP, SweepTrial, Training, trial_source
from mlmclm.tune import Finetune, param_space, trial_name
from registered_members import Root
from small_models import FILL, GOOD, save_small_model, write_entities, write_sentiment, write_table
from sweep_cells import Retrieves, make_cells

EXAMPLE = Path(__file__).parents[1] / "examples" / "asha.py"
SPACE = {
    "tasks": ["sst2"],
    "learning_rates": [1e-3, 1e-2],
    "seeds": [0, 1],
    "protocol": {"max_steps": 20, "max_length": 32, "batch_size": 8},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, model/, and space.yaml."""
    folder = tmp_path_factory.mktemp("tune")
    write_sentiment(folder / "data", train=80, test=40)
    write_entities(folder / "data", train=80, test=20)
    save_small_model(folder / "model")
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ray_session(tmp_path_factory.mktemp("session"), num_cpus=2):
        yield


def axes(place: Path, store: Path, **options: Any) -> dict[str, Any]:
    where = {"store": store, "data": place / "data"}
    return param_space(place / "space.yaml", [str(place / "model")], **where, report_every=6, **options)


def config(place: Path, store: Path, **changes: Any) -> dict[str, Any]:
    return {**axes(place, store), "learning_rate": 1e-2, "seed": 1, **changes}


def reports(config: dict[str, Any]) -> list[dict[str, Any]]:
    """All reports of one trial, in this process."""
    trainable, found = Finetune(config), []
    while not found or not found[-1]["done"]:
        found.append(trainable.train())
    trainable.stop()
    return found


def finetuned(place: Path, store: Path, *words: str) -> Path:
    """The result's file of `mlmclm finetune` with the same settings."""
    where = ["--space", place / "space.yaml", "--store", store, "--data", place / "data"]
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in ("finetune", place / "model", "sst2", *words, *where)])
    assert not ended.value.code
    (found,) = (store / "cells").glob("*/*.json")
    return found


def content(file: Path) -> dict[str, Any]:
    """A result's file without what its computing cost, and so without its checksum."""
    return {**json.loads(file.read_bytes()), "cost": None, CHECKSUM: None}


def test_a_trial_files_what_finetune_files_whatever_it_reports(place: Path, tmp_path: Path) -> None:
    found = reports(config(place, tmp_path / "a"))
    assert [(each["step"], each["training_iteration"]) for each in found] == [(6, 1), (12, 2), (18, 3), (20, 4)]
    (filed,) = (tmp_path / "a" / "cells").glob("*/*.json")
    wanted = finetuned(place, tmp_path / "b", "--lr", "1e-2", "--seed", "1")
    assert content(filed) == content(wanted) and filed.name == wanted.name
    assert filed.with_suffix(".parquet").read_bytes() == wanted.with_suffix(".parquet").read_bytes()
    last, scores = found[-1], content(filed)["scores"]
    assert (last["computed"], last["status"], last["key"]) == (True, "ok", filed.stem)
    assert (last["validation"], last["test"]) == (scores["validation"], scores["test"])
    assert last["score"] == scores["validation"]["accuracy"]
    assert len({str(each["validation"]) for each in found}) > 1, f"reports are of different weights {found}"


def test_a_trial_whose_cell_is_in_the_results_store_costs_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reports(config(place, tmp_path))
    monkeypatch.setattr("mlmclm.finetuning.run.run_training", None)
    (again,) = reports(config(place, tmp_path))
    for name in ("score", "validation", "test", "step", "training_iteration", "key", "status"):
        assert again[name] == first[-1][name], name
    assert not again["computed"]


def test_a_trial_that_is_stopped_early_leaves_no_result_and_no_claim(place: Path, tmp_path: Path) -> None:
    trainable = Finetune(config(place, tmp_path))
    assert not trainable.train()["done"]
    assert list((tmp_path / "claims").iterdir())
    trainable.stop()
    assert not list((tmp_path / "cells").glob("*/*")) and not list((tmp_path / "claims").iterdir())


def test_a_paused_trial_goes_on_where_it_was(place: Path, tmp_path: Path) -> None:
    whole = reports(config(place, tmp_path / "a"))
    own = config(place, tmp_path / "b")
    trainable = Finetune(own)
    trainable.train()
    saved = trainable.save_checkpoint("")
    trainable.stop()
    other = Finetune(own)
    other.load_checkpoint(saved)
    assert [other.train()["score"] for _ in range(3)] == [each["score"] for each in whole[1:]]
    other.reset_config({**own, "learning_rate": 1e-3})
    with pytest.raises(UserError, match="one config from beginning to end"):
        other.load_checkpoint(saved)
    other.stop()


def test_a_process_that_goes_on_with_another_trial_is_a_fresh_one(place: Path, tmp_path: Path) -> None:
    trainable = Finetune(config(place, tmp_path / "a", seed=0))
    trainable.train()
    assert trainable.reset_config(config(place, tmp_path / "a"))
    found = [trainable.train() for _ in range(4)]
    trainable.stop()
    assert [each["score"] for each in found] == [each["score"] for each in reports(config(place, tmp_path / "b"))]


def test_a_diverged_cell_is_filed_and_has_no_score(place: Path, tmp_path: Path) -> None:
    last = reports(config(place, tmp_path, weight_decay=1e30))[-1]
    assert last["status"] == "diverged" and math.isnan(last["score"]) and last["test"] == {}
    assert ResultsStore(tmp_path).find(last["key"]) is not None


def test_a_trial_that_waits_for_a_node_says_for_what(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Cluster(({"CPU": 2.0},), {"CPU": 2.0}, joinable=True)
    monkeypatch.setattr("mlmclm.cluster.cluster.cluster_view", lambda: lambda: alone)
    space = param_space(SPACE | {"cpus_per_cell": 3}, [str(place / "model")], store=tmp_path, data=place / "data")
    assert trial_source(space).bundle()["CPU"] == 3
    said = capsys.readouterr().err
    assert "waiting for nodes: no node has 3 CPU for a trial yet: it has 2 CPUs" in said and "cpus_per_cell" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "modle"}, "unknown model 'modle'. Did you mean 'model'?"),
        ({"model": ["model"]}, "unknown model \"['model']\". Did you mean 'model'?"),
        ({"task": "sst"}, "unknown task 'sst'. Did you mean 'sst2'?"),
        ({"task": "sst2+sst2"}, "task sst2+sst2: each task may be in it once"),
        ({"learning_rate": 2}, "learning_rate 2: a learning rate is a number between 0 and 1"),
        ({"learning_rate": "abc"}, "learning_rate 'abc': a learning rate is a number between 0 and 1"),
        ({"learning_rate": None}, "learning_rate None: a learning rate is a number"),
        ({"seed": -1}, "seed -1: a seed is a whole number from 0 on"),
        ({"epoch": 2}, "unknown key 'epoch'. Did you mean 'epochs'?"),
        ({"max_length": 16}, "max_length: it cannot be searched, because tasks are tokenised once"),
    ],
)
def test_a_wrong_config_is_an_error(place: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Finetune(config(place, tmp_path, **changes)).train()
    assert message in str(caught.value)


def test_a_config_without_a_seed_is_an_error_and_numpy_s_numbers_are_taken(place: Path, tmp_path: Path) -> None:
    whole = config(place, tmp_path)
    with pytest.raises(UserError, match="seed: the config needs one"):
        Finetune({name: value for name, value in whole.items() if name != "seed"}).train()
    found = Finetune({**whole, "seed": np.int64(1), "learning_rate": np.float32(0.5)}).train()
    assert (found["seed"], found["learning_rate"]) == (1, 0.5)
    for wrong in (0, -1, "5"):
        with pytest.raises(UserError, match=f"report_every {wrong!r}: a number of steps"):
            param_space(SPACE, [str(place / "model")], store=tmp_path, data=place / "data", report_every=wrong)  # type: ignore[arg-type]


def test_names_of_trials_have_searched_settings_and_any_value(place: Path, tmp_path: Path) -> None:
    def named(**changes: Any) -> str:
        return trial_name(SimpleNamespace(config=config(place, tmp_path, **changes)))

    assert named() == "model/sst2/lr1e-2/s1"
    assert named(weight_decay=0.2, epochs=2) == "model/sst2/lr1e-2/weight_decay0.2-epochs2/s1"
    assert named(weight_decay=("__fn_ph", "1a2b")) == "model/sst2/lr1e-2/weight_decaysampled/s1"
    assert named(learning_rate="abc", seed="0") == "model/sst2/lrabc/0", "the trial says what is wrong"


def test_another_store_or_other_data_make_another_search_space(place: Path, tmp_path: Path) -> None:
    def key(store: str, data: Path) -> str:
        (found,) = param_space(SPACE, [str(place / "model")], store=tmp_path / store, data=data)[SWEEP]
        return str(found)

    write_sentiment(tmp_path / "data", train=81, test=40)
    assert key("a", place / "data") == key("a", place / "data")
    assert len({key("a", place / "data"), key("b", place / "data"), key("a", tmp_path / "data")}) == 3


def test_a_changed_entry_makes_another_search_space(place: Path, tmp_path: Path) -> None:
    def key(**changes: Any) -> str:
        (found,) = (axes(place, tmp_path) | changes)[SWEEP]
        return str(found)

    def rates(most: float) -> Any:
        return tune.loguniform(1e-4, most)

    keys = [
        key(learning_rate=rates(1e-2)),
        key(learning_rate=rates(1e-1)),
        key(learning_rate=tune.uniform(1e-4, 1e-2)),
        key(learning_rate=tune.grid_search([1e-4, 1e-2])),
        key(epochs=tune.choice([1, 2])),
        key(epochs=tune.choice(["1", "2"])),
        key(learning_rate=tune.sample_from(functools.partial(pow, 1e-2))),
        key(learning_rate=tune.sample_from(functools.partial(pow, 1e-1))),
        key(seed=0),
        key(),
    ]
    assert key(learning_rate=rates(1e-2)) == keys[0] and len(set(keys)) == len(keys)
    assert key(learning_rate=tune.sample_from(functools.partial(pow, 1e-2))) == keys[6], "not by its address"
    # This module uses runpy, so no key can be made of its functions.
    assert key(learning_rate=tune.sample_from(rates)) != key(learning_rate=tune.sample_from(rates))
    space, other = axes(place, tmp_path), axes(place, tmp_path)
    space |= {"seed": 0}
    other["seed"] = 0
    assert [*space[SWEEP]] == [*other[SWEEP]] == [*copy.deepcopy(other)[SWEEP]] == [keys[-2]]


def test_a_trial_that_no_node_can_ever_hold_is_refused(cluster: None, place: Path, tmp_path: Path) -> None:
    space = param_space(SPACE | {"cpus_per_cell": 3}, [str(place / "model")], store=tmp_path, data=place / "data")
    with pytest.raises(UserError, match=r"A trial needs 3 CPU on one node.*it has 2 CPUs.*cpus_per_cell"):
        tune.Tuner(Finetune, param_space=space, run_config=run_config(tmp_path / "ray")).fit()


def test_settings_of_a_grid_are_axes_and_any_other_setting_can_be_one(place: Path, tmp_path: Path) -> None:
    grid = {**SPACE, "grid": {"epochs": [1, 2]}}
    where: dict[str, Any] = {"store": tmp_path, "data": place / "data"}
    found = param_space(grid, {"mine": str(place / "model")}, **where)
    assert found["epochs"] == {"grid_search": [1, 2]}
    assert (found["model"], found["task"]) == ("mine", "sst2")
    trial = trial_source(found).trial(
        {**found, "learning_rate": 1e-3, "seed": 0, "epochs": 2, "weight_decay": 0.5, "max_steps": None}
    )
    assert (trial.first.protocol.epochs, trial.first.protocol.weight_decay) == (2, 0.5)
    assert trial.every == 10, "an epoch of 80 examples"
    with pytest.raises(UserError, match="epochs: the space's grid has several values"):
        trial_source(found).trial({"model": "mine", "task": "sst2", "learning_rate": 1e-3, "seed": 0})
    with pytest.raises(UserError, match="have different grids"):
        grids = {**grid, "tasks": ["sst2", "conll2003"], "task_grids": {"sst2": {"epochs": [3, 4]}}}
        param_space(grids, [str(place / "model")], **where)


def test_a_task_starts_from_the_best_cell_of_another_once_that_is_known(place: Path, tmp_path: Path) -> None:
    both = {**SPACE, "tasks": ["sst2", "conll2003"], "learning_rates": [1e-2], "seeds": [1]}
    starting = {**both, "start_from": {"conll2003": "sst2"}}
    found = param_space(starting, [str(place / "model")], store=tmp_path, data=place / "data")
    with pytest.raises(UserError, match="starts from the model's best sst2 cell: fine-tune model on sst2"):
        reports({**found, "task": "conll2003"})
    source, last = reports({**found, "task": "sst2"})[-1], reports({**found, "task": "conll2003"})[-1]
    filed = ResultsStore(tmp_path).find(last["key"])
    assert filed is not None and filed["start"] == {"cell": source["key"], "task": "sst2"}


def test_tasks_that_share_a_training_are_one_trial_that_reports_both(place: Path, tmp_path: Path) -> None:
    chance = random.Random(2)
    for split, count in (("train", 80), ("validation_matched", 20), ("validation_mismatched", 20)):
        labels = [chance.randrange(3) for _ in range(count)]
        texts = [f"{split} {number} {FILL[number % len(FILL)]}" for number in range(count)]
        rows = {"premise": texts, "hypothesis": [GOOD[label] for label in labels], "label": labels}
        write_table(tmp_path / "data" / "mnli", split, rows)
    write_entities(tmp_path / "data", train=80, test=20)
    space = {**SPACE, "tasks": ["conll2003", "mnli", "mnli_mm"], "learning_rates": [1e-2], "seeds": [1]}

    def found(store: str, *tasks: str) -> dict[str, Any]:
        given = space | {"tasks": list(tasks)}
        return param_space(given, [str(place / "model")], store=tmp_path / store, data=tmp_path / "data")

    all_three = found("a", "conll2003", "mnli", "mnli_mm")
    assert all_three["task"] == {"grid_search": ["conll2003", "mnli+mnli_mm"]}
    last, alone = reports({**all_three, "task": "mnli+mnli_mm"})[-1], reports(found("b", "mnli_mm"))[-1]
    assert (last["task"], last["computed"]) == ("mnli+mnli_mm", True) and alone["task"] == "mnli_mm"
    assert last["mnli_mm"]["test"] == alone["test"] and last["mnli_mm"]["key"] == alone["key"]
    assert ResultsStore(tmp_path / "a").keys() == {last["key"], alone["key"]}
    both = {**all_three, "task": "mnli+mnli_mm"}
    assert trial_name(SimpleNamespace(config=both)) == "model/mnli+mnli_mm/lr1e-2/s1"
    again = reports(both)
    assert len(again) == 1 and not again[0]["computed"] and not again[0]["mnli_mm"]["computed"]
    with pytest.raises(UserError, match="share no training"):
        trial_source(all_three).trial({**all_three, "task": "mnli+conll2003"})


def run_config(folder: Path, **options: Any) -> tune.RunConfig:
    return tune.RunConfig(name="tuned", storage_path=str(folder), verbose=0, **options)


@pytest.mark.slow
def test_asha_stops_trials_and_what_it_stops_is_not_filed(cluster: None, place: Path, tmp_path: Path) -> None:
    search = runpy.run_path(str(EXAMPLE))["search"]
    where = {"store": tmp_path / "store", "data": place / "data", "run": run_config(tmp_path / "ray")}
    space = tmp_path / "space.yaml"  # one rate that learns, and one that doesn't, which comes after it
    space.write_text(yaml.safe_dump({**SPACE, "learning_rates": [1e-2, 1e-7]}))
    results = search(str(space), "sst2", str(place / "model"), grace_period=2, at_once=1, **where)
    assert not results.errors
    table = results.get_dataframe()
    whole, cut = table[table["key"].notna()], table[table["key"].isna()]
    assert len(table) == 4 and len(whole) and len(cut), "some trials were stopped"
    assert {file.stem for file in (tmp_path / "store" / "cells").glob("*/*.json")} == set(whole["key"])
    best = results.get_best_result()
    assert best.metrics is not None and best.metrics["score"] == table["score"].max()


class Interrupts(tune.Callback):
    """A user's own callback, which presses Ctrl-C when a trial has ended."""

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_an_interrupted_tuner_is_restored_and_computes_only_what_is_missing(
    cluster: None, place: Path, tmp_path: Path
) -> None:
    space = {**axes(place, tmp_path / "store"), "seed": 0}
    first = tune.Tuner(
        Finetune,
        param_space=space,
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=run_config(tmp_path / "ray", callbacks=[Interrupts()]),
    ).fit()
    ((key, filed),) = ((each.stem, each.read_bytes()) for each in (tmp_path / "store" / "cells").glob("*/*.json"))
    assert len(first) < 2 or not first.get_dataframe()["done"].all()
    results = tune.Tuner.restore(str(tmp_path / "ray" / "tuned"), Finetune, param_space=space).fit()
    table = results.get_dataframe()
    assert not results.errors and len(table) == 2 and table["done"].all()
    results_store = ResultsStore(tmp_path / "store")
    assert results_store.path(key).read_bytes() == filed and results_store.keys() == set(table["key"])


@pytest.mark.slow
def test_a_restored_tuner_refuses_another_search_space(cluster: None, place: Path, tmp_path: Path) -> None:
    space = axes(place, tmp_path / "store") | {"learning_rate": 1e-2, "seed": 0}
    assert not tune.Tuner(Finetune, param_space=space, run_config=run_config(tmp_path / "ray")).fit().errors
    where: dict[str, Any] = {"store": tmp_path / "store", "data": place / "data", "report_every": 6}
    other = param_space(SPACE | {"seeds": [0, 1, 2]}, [str(place / "model")], **where)
    for each in (other, space | {"seed": 1}):
        with pytest.raises(ValueError, match="pass in the same `param_space` that was used"):
            tune.Tuner.restore(str(tmp_path / "ray" / "tuned"), Finetune, param_space=each)


@pytest.mark.slow
def test_a_scheduler_that_changes_settings_is_refused_with_the_reason(
    cluster: None, place: Path, tmp_path: Path
) -> None:
    changes = PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=1, hyperparam_mutations={"learning_rate": [1e-3, 1e-2]}
    )
    results = tune.Tuner(
        Finetune,
        param_space=axes(place, tmp_path / "store"),
        tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=changes),
        run_config=run_config(tmp_path / "ray"),
    ).fit()
    assert results.errors and all("use a scheduler that changes none" in str(each) for each in results.errors)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster", "registers")
def test_what_is_registered_here_computes_in_the_trials(place: Path, tmp_path: Path) -> None:
    mlmclm.register("schedule", None, Root)
    space = SPACE | {"learning_rates": [1e-2], "seeds": [0], "protocol": SPACE["protocol"] | {"decay": "root"}}
    found = param_space(space, [str(place / "model")], store=tmp_path, data=place / "data")
    results = tune.Tuner(
        Finetune, param_space=found, run_config=tune.RunConfig(storage_path=str(tmp_path / "tuned"), verbose=0)
    ).fit()
    assert not results.errors, results.errors
    (result,) = results
    assert result.metrics["computed"] and ResultsStore(tmp_path).find(result.metrics["key"]) is not None


def test_optuna_draws_learning_rates_between_those_of_the_space(cluster: None, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed: make .venv/.installed-dev")
    from ray.tune.search.optuna import OptunaSearch

    results = tune.Tuner(
        Finetune,
        param_space=axes(place, tmp_path / "store", sampled=True),
        tune_config=tune.TuneConfig(
            metric="score", mode="max", num_samples=2, search_alg=OptunaSearch(seed=3), max_concurrent_trials=2
        ),
        run_config=run_config(tmp_path / "ray"),
    ).fit()
    table = results.get_dataframe()
    assert (
        not results.errors
        and len(set(table["learning_rate"])) == 2
        and table["learning_rate"].between(1e-3, 1e-2).all()
    )
    for row in table.to_dict("records"):
        filed = ResultsStore(tmp_path / "store").find(row["key"])
        assert filed is not None
        assert (filed["learning_rate"], filed["seed"]) == (row["config/learning_rate"], row["config/seed"])


@pytest.mark.slow
def test_processes_that_are_reused_give_the_same_bits(cluster: None, place: Path, tmp_path: Path) -> None:
    files = []
    for reused in (True, False):
        store = tmp_path / str(reused)
        results = tune.Tuner(
            Finetune,
            param_space=axes(place, store),
            tune_config=tune.TuneConfig(reuse_actors=reused, max_concurrent_trials=1 if reused else None),
            run_config=run_config(tmp_path / f"ray-{reused}"),
        ).fit()
        assert not results.errors and len(results) == 4
        assert (results.get_dataframe()["pid"].nunique() == 1) == reused
        files.append({each.name: content(each) for each in (store / "cells").glob("*/*.json")})
    assert files[0] == files[1] and len(files[0]) == 4


@pytest.mark.slow
def test_callbacks_of_ray_take_all_reports(cluster: None, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sweep_cells)
    (cell,) = make_cells(1)
    own = SweepTrial((Training({cell_key(cell): cell}),), tmp_path / "store", by_itself=True, resources={"CPU": 1.0})
    address = f"sqlite:///{tmp_path}/mlflow.db"
    try:
        results = tune.Tuner(
            Retrieves,
            param_space=own.config,
            run_config=run_config(
                tmp_path / "ray", callbacks=[MLflowLoggerCallback(tracking_uri=address, experiment_name="own")]
            ),
        ).fit()
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sweep_cells)
    assert not results.errors
    client = mlflow.MlflowClient(address)
    experiment = client.get_experiment_by_name("own")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["validation/ndcg_at_10"] == run.data.metrics["test/ndcg_at_10"] == 0.5
    assert results[0].metrics is not None and results[0].metrics["metric"] == "ndcg_at_10"
    assert run.data.params["learning_rate"] == "0.001" and run.data.params["sweep"].startswith("<a/sst2/lr1e-3/s0 in ")
