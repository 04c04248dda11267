"""What `mlmclm data order` gives is what a step saw, whatever the division into workers, and it can be written as files."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from listening import is_loopback, watched
from mlmclm.cli.main import main
from mlmclm.corpora.tokenizer import vocabulary
from mlmclm.pretraining import states
from mlmclm.pretraining.checkpoints import read_weights
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import PreparedStudy, prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.work import train_missing_stages
from small_study import write_study

MODEL = "1m-clm-1-mlm40-2"
BERT = {"mask": 0.8, "random": 0.1, "keep": 0.1}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of CLM and one of MLM with BERT's corruption, in micro batches of 2 sequences of 2 workers."""
    return write_study(
        tmp_path_factory.mktemp("seen"),
        models=[MODEL, "1m-untrained"],
        recipe={
            "block_length": 32, "batch": 8, "peak_learning_rate": 3e-3, "warmup_steps": 1, "decay_steps": 1, "workers": 2,
            "micro_batch": 2, "precision": "fp32", "corruption": BERT, "evaluation_blocks": 8,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(study: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedStudy:
    return prepare_study(load_study(study), Place(tmp_path_factory.mktemp("store"), study.parent / "data"))


@pytest.fixture(scope="module")
def trained(made: PreparedStudy, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Trains the model; `listening` has the addresses of each process meanwhile, `rendezvous` the modes of the folder."""
    from mlmclm.cluster.ray_cluster import prepare_environment, ray_session

    modes: set[int] = set()

    def look() -> None:
        for file in made.place.store.glob("runs/*/rendezvous/*"):
            with suppress(FileNotFoundError):
                modes.add(file.parent.stat().st_mode & 0o777)

    prepare_environment()
    with ray_session(tmp_path_factory.mktemp("ray"), num_cpus=2), watched(look) as listening:
        train_missing_stages(made)
    return SimpleNamespace(listening=listening, rendezvous=modes)


def order(made: PreparedStudy, study: Path, *words: str | Path) -> None:
    """Runs `mlmclm data order`, which has to end well."""
    with pytest.raises(SystemExit) as ended:
        main(
            ["data", "order", *map(str, (study, "--store", made.place.store, "--data", study.parent / "data", *words))]
        )
    assert ended.value.code == 0


def exported(made: PreparedStudy, study: Path, path: Path) -> list[dict[str, Any]]:
    """The two steps of the model, one mapping a row."""
    order(made, study, "--steps", "0:2", "--model", MODEL, "--labels", "--export", path)
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return parquet.read_table(path).to_pylist()


@pytest.mark.slow
def test_while_a_stage_runs_no_process_listens_to_others(trained: SimpleNamespace) -> None:
    assert any("RayTrainWorker" in title for title in trained.listening)
    assert {
        title: addresses for title, addresses in trained.listening.items() if not all(map(is_loopback, addresses))
    } == {}
    assert trained.rendezvous == {0o700}


@pytest.mark.slow
def test_the_losses_of_a_real_run_are_those_of_the_exported_rows(
    study: Path, made: PreparedStudy, trained: SimpleNamespace, tmp_path: Path
) -> None:
    import torch

    from mlmclm.models.build import build_model, load_prepared_tokenizer, model_config
    from mlmclm.pretraining.collator import Collator

    rows = exported(made, study, tmp_path / "order.parquet")
    assert [(row["step"], row["row"]) for row in rows] == [(step, row) for step in (0, 1) for row in range(8)]
    target = made.plan.targets[0]
    steps = [row for row in states.curve(made.place.store, target.key(made.fingerprint)) if "loss" in row]
    for row in steps:  # looked at alone: the look is in the rate, and not in the step's own time
        assert 0 < row["step_seconds"] <= 8 * 32 / row["tokens_per_second"]
    losses = [row["loss"] for row in steps]
    model = build_model(model_config("1m", load_prepared_tokenizer(made.corpus.tokenizer), 32), made.study.recipe.seed)
    for step, causal in ((0, True), (1, False)):
        if step == 1:  # the weights after the step of CLM, which the second stage started from
            start = made.plan.stages[1].start.key(made.fingerprint)
            model.load_state_dict(read_weights(states.state_folder(made.place.store, start)))
        batch = [row for row in rows if row["step"] == step]
        input_ids, labels = (torch.tensor([row[name] for row in batch]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids, is_causal=causal).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert losses[step] == pytest.approx(float(expected), rel=1e-5)
    from mlmclm.pretraining.worker import VALIDATION_STEP

    model.load_state_dict(read_weights(states.state_folder(made.place.store, target.key(made.fingerprint))))
    label = Collator(made.plan.stages[1].objective, vocabulary(made.corpus.tokenizer), made.study.recipe.corruption, 0)
    blocks = np.arange(8)
    input_ids, labels = map(
        torch.from_numpy, label(made.corpus.validation.take(blocks), rows=blocks, step=VALIDATION_STEP)
    )
    with torch.no_grad():
        logits, wanted = model(input_ids, is_causal=False).logits.flatten(0, 1), labels.flatten()
    right = (logits.argmax(1) == wanted)[wanted != -100]
    (row,) = [row for row in states.curve(made.place.store, target.key(made.fingerprint)) if "validation_loss" in row][
        1:
    ]
    assert row["validation_accuracy"] == pytest.approx(float(right.float().mean()), rel=1e-6)
    assert row["validation_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, wanted)), rel=1e-5)


def test_the_rows_are_the_micro_batches_of_all_workers_put_together(
    study: Path, made: PreparedStudy, tmp_path: Path
) -> None:
    from mlmclm.pretraining.collator import Collator
    from mlmclm.pretraining.worker import _micro_batches, _tokens

    rows = exported(made, study, tmp_path / "order.jsonl")
    recipe = made.study.recipe
    train = made.corpus.train
    files = [made.corpus.folder / shard.file for shard in train.shards]
    blocks = np.concatenate([np.fromfile(file, dtype=train.dtype).reshape(-1, 32) for file in files])
    special = vocabulary(made.corpus.tokenizer).special
    for step, stage in enumerate(made.plan.stages):
        batch = [row for row in rows if row["step"] == step]
        label = Collator(stage.objective, vocabulary(made.corpus.tokenizer), recipe.corruption, recipe.seed)
        for world, micro in ((1, 8), (2, 2), (4, 1)):
            job: Any = SimpleNamespace(train=train, recipe=recipe, samples=lambda step: range(8 * step, 8 * step + 8))
            engines: list[Any] = [
                SimpleNamespace(world=world, rank=rank, accumulation=8 // world // micro) for rank in range(world)
            ]
            parts = [
                part
                for engine in engines
                for part in _micro_batches(job, engine, label, step, _tokens(job, engine, step))
            ]
            for index, name in enumerate(("input_ids", "labels")):
                assert [row[name] for row in batch] == [line for part in parts for line in part[index].tolist()]
        for row in batch:
            tokens = blocks[row["block"]].tolist()
            for position, (token, shown, wanted) in enumerate(
                zip(tokens, row["input_ids"], row["labels"], strict=True)
            ):
                if stage.objective.causal:
                    assert (shown, wanted) == (token, (*tokens[1:], -100)[position])
                else:
                    assert wanted in (-100, token)
                    assert wanted == -100 or (token not in special and (shown == 3 or shown not in special))
                    assert wanted != -100 or shown == token


def test_parquet_json_lines_and_printed_rows_say_the_same(
    study: Path, made: PreparedStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = exported(made, study, tmp_path / "order.parquet")
    assert exported(made, study, tmp_path / "order.jsonl") == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["order.jsonl", "order.parquet"]
    capsys.readouterr()
    order(made, study, "--steps", "0:2", "--model", MODEL, "--labels", "--json")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    order(made, study, "--steps", "1:2", "--json")
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["block"] for row in plain] == [row["block"] for row in rows[8:]]
    assert all(row.keys() == {"step", "row", "block", "input_ids"} for row in plain)
    assert all(row["input_ids"] == made.corpus.train.take(np.array([row["block"]]))[0].tolist() for row in plain)
    order(made, study, "--steps", "1:2", "--model", MODEL)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in printed] == [
        f"step 1 row {row['row']} block {row['block']}" for row in plain
    ]
    assert printed[0].split(": ")[1].split(" | ")[0].split() == [str(token) for token in rows[8]["input_ids"]]


def test_tables_of_many_batches_are_written_as_they_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlmclm.pretraining import seen

    monkeypatch.setattr(seen, "ROW_GROUP_TOKENS", 100)
    alive: list[int] = []

    def batches() -> Any:
        for step in range(50):
            alive.append(step)
            yield seen.TrainingBatch(step, np.arange(4), np.full((4, 8), step), None, np.full(4, 8))

    seen.export(batches(), tmp_path / "many.parquet")
    assert parquet.read_metadata(tmp_path / "many.parquet").num_row_groups == 13
    table = parquet.read_table(tmp_path / "many.parquet")
    assert table["step"].to_pylist() == [step for step in alive for _ in range(4)]
    assert table["input_ids"].to_pylist() == [[step] * 8 for step in alive for _ in range(4)]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--steps", "0:3"], ["the longest model of the study takes 2 steps", "within 0:2"]),
        (["--steps", "1:1"], ["expected a:b with a < b"]),
        (["--steps", "1"], ["expected a:b with a < b"]),
        (["--steps", "0:1", "--labels"], ["name a model of the study with --model"]),
        (["--steps", "0:1", "--model", "1m-clm-1-mlm40-3"], [f"Did you mean '{MODEL}'"]),
        (["--steps", "0:1", "--model", "1m-untrained"], ["model '1m-untrained' takes 0 steps"]),
        (["--steps", "0:1", "--export", "rows.csv"], ["rows.csv", "allowed: .parquet, .jsonl"]),
    ],
)
def test_a_question_without_an_answer_is_refused_with_what_is_allowed(
    study: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "order", str(study), *words])
    printed = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert all(part in printed for part in parts), printed
