"""A published bundle says what the report of its store says, is small and safe, and is refused when it is damaged."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from small_store import SPACE, Study

import mlmclm
from mlmclm.answers.outcomes import Outcomes
from mlmclm.answers.record import FACTS
from mlmclm.cli.main import main
from mlmclm.corpora.hub_repository import HubRepository
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.run import run_cell
from mlmclm.reports.study_facts import StudyFacts, ZeroShotFacts
from mlmclm.results.examples import to_parquet
from mlmclm.storage.checksums import write_sealed
from mlmclm.storage.files import canonical_json
from mlmclm.storage.place import Place
from mlmclm.studies.api import published
from mlmclm.studies.prepare import prepare_study
from mlmclm.studies.recompute import BundleCheck, check_of, models_in
from mlmclm.studies.study_file import load_study
from mlmclm.studies.study_record import commits
from mlmclm.studies.study_tracking import StudyRuns
from mlmclm.sweeps.cells import recorded_cell
from mlmclm.sweeps.results_store import ResultsStore
from small_models import save_small_decoder
from small_study import remember, write_study
from sweep_cells import make_result

TABLES = (
    "cells",
    "coverage",
    "curves",
    "best",
    "stability",
    "components",
    "overall",
    "comparisons",
    "claims",
    "ranks",
)


class PlantedStudy(Study):
    """Its cells have outcomes of test examples by chance, better for the trained model."""

    def compute(self, cell: Cell, results_store: ResultsStore) -> dict[str, Any]:
        draws = np.random.default_rng(random.Random(cell_key(cell)).getrandbits(32))
        gold = np.arange(40) % 2
        right = draws.random(40) < (0.85 if "mlm" in cell.model else 0.6) - 20 * abs(cell.learning_rate - 1e-3)
        outcomes = {"gold": gold, "prediction": np.where(right, gold, 1 - gold), "correct": right}
        scores = {"validation": {"accuracy": float(right[::2].mean())}, "test": {"accuracy": float(right.mean())}}
        result = make_result(cell, worker="workstation-of-ada/7") | {"scores": scores, "protocol": cell.identity()}
        result["cost"] |= {"device": "a processor", "backend": "cpu", "versions": {"torch": "2"}}
        results_store.write_examples(result, to_parquet(result, outcomes, ("bad", "good")))
        return result

    def keep(self, cell: Cell) -> None:
        """Nothing starts from these cells."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study and its store, with planted cells."""
    folder = tmp_path_factory.mktemp("published")
    initial = {"tiny": str(save_small_decoder(folder / "decoder"))}
    path = write_study(folder, initial=initial, models=["tiny-untrained", "tiny-mlm40-12"], baseline="tiny-untrained")
    values = yaml.safe_load(path.read_text())
    del values["tokenizer"]
    values["tracking"] = "http://ada:secret@example.org"
    path.write_text(yaml.safe_dump(values))
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE | {"learning_rates": [1e-3, 3e-3], "seeds": [0, 1, 2]}))
    planted = PlantedStudy(folder, folder / "store")
    planted.make()
    remember(planted.sweep(prepare_study(planted.loaded, planted.place)))
    return folder


def of_store(made: Path) -> Any:
    return mlmclm.open(made / "store", data=made / "data").study(made / "study.yaml")


@pytest.fixture(scope="module")
def folder(made: Path) -> Path:
    """Its bundle."""
    of_store(made).publish(made / "bundle")
    return made / "bundle"


def test_a_bundle_gives_the_tables_claims_and_comparisons_of_its_store(made: Path, folder: Path) -> None:
    there, here = of_store(made).results, published(folder)
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(here.analysis, name), getattr(there.analysis, name))
    assert here.analysis.effects.keys() == there.analysis.effects.keys()
    pd.testing.assert_frame_equal(here.claims(), there.claims())
    pair = ("tiny-mlm40-12", "tiny-untrained")
    assert here.compare(*pair).rows == there.compare(*pair).rows
    assert here.compare(*pair).rows[0]["covers"] == "seeds and examples", "the noise of the test set is known"
    assert [each.phases for each in here.facts.models] == [each.phases for each in there.facts.models]
    assert here.facts.provenance == there.facts.provenance
    assert here.advice.answer == there.advice.answer and here.facts.basis.seconds == there.facts.basis.seconds
    for key in (row["key"] for row in there.rows):
        result = next(row for row in there.rows if row["key"] == key)
        ours, theirs = here.kept.examples(result), there.kept.examples(result)
        assert ours.label_names == theirs.label_names
        assert {name: values.tolist() for name, values in ours.columns.items()} == {
            name: values.tolist() for name, values in theirs.columns.items()
        }


def test_the_same_store_gives_the_same_bytes_without_paths_and_names_of_machines(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    assert of_store(made).publish(tmp_path / "again").contents() == published(folder).record.contents()
    texts = [path.read_text() for path in folder.rglob("*") if path.suffix in (".json", ".yaml", ".csv", ".md")]
    texts += pq.read_table(folder / "cells.parquet")["result"].to_pylist()
    for text in texts:
        assert str(made) not in text and "of-ada" not in text and "secret" not in text
    again = load_study(folder / "study.yaml")
    assert again.find_space().learning_rates == (1e-3, 3e-3) and again.initial == {"tiny": "decoder"}
    table = pd.read_csv(folder / "results.csv")
    assert len(table) == 12 and table["seconds"].eq(2.0).all() and table["key"].is_unique


def test_results_need_neither_models_nor_data(made: Path, folder: Path, tmp_path: Path) -> None:
    for part in ("cells", "studies"):
        shutil.copytree(made / "store" / part, tmp_path / "store" / part, ignore=shutil.ignore_patterns("models"))
    study = mlmclm.open(tmp_path / "store").study("small")
    (made / "space.yaml").rename(made / "away.yaml")
    try:
        found = study.results
    finally:
        (made / "away.yaml").rename(made / "space.yaml")
    expected = of_store(made).results
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(found.analysis, name), getattr(expected.analysis, name))
    assert found.facts.models == expected.facts.models and found.facts.recipe == expected.facts.recipe
    runs = StudyRuns(study.file, study.place)
    runs.recorded()
    announced = {run.key: run.params for run in runs.told.records}
    runs.recorded(found)
    assert Counter(run.kind for run in runs.told.records) == {"sweep": 1, "model": 2, "group": 2}
    assert all(announced[run.key].items() <= run.params.items() for run in runs.told.records)
    study.publish(tmp_path / "bundle")
    assert (tmp_path / "bundle" / "cells.parquet").read_bytes() == (folder / "cells.parquet").read_bytes()


def test_names_on_the_hub_are_published_at_the_commits_of_the_store(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    values = yaml.safe_load(path.read_text())
    values |= {
        "corpus": {"source": "me/texts", "max_tokens": 10_000},
        "tokenizer": {"name": "me/words", "revision": "v2"},
    }
    values |= {
        "initial": {"own": "me/model@v1", "here": "folder"},
        "models": ["own-untrained", "here-untrained"],
        "baseline": None,
    }
    path.write_text(yaml.safe_dump(values))
    study, store = load_study(path), tmp_path / "store"
    assert commits(study, store, {})["corpus"] == values["corpus"]
    names = {"corpus": HubRepository("me/texts", "dataset"), "tokenizer": HubRepository("me/words", "model", "v2")}
    for number, repository in enumerate(names.values()):
        write_sealed(repository._pin(store), {"commit": str(number) * 40})
    found = commits(study, store, {"own": "c" * 40, "here": None})
    assert found == {
        "corpus": {**values["corpus"], "revision": "0" * 40},
        "tokenizer": {"name": "me/words", "revision": "1" * 40},
        "initial": {"own": f"me/model@{'c' * 40}", "here": "folder"},
    }


def test_facts_of_zero_shot_tasks_are_read_again() -> None:
    """How a chance level is got is text among numbers."""
    metrics = {"acc": {"score": 0.5, "low": None, "high": None, "examples": 4, "chance": 0.25, "chance_how": "a guess"}}
    own = StudyFacts("s", "", (), (), zero_shot=(ZeroShotFacts("m", "t", "causal", "acc", metrics),))
    assert FACTS.validate_json(FACTS.dump_json(own)) == own


def test_parts_of_a_study_are_one_and_other_studies_are_refused(made: Path, folder: Path, tmp_path: Path) -> None:
    whole = published(folder).record
    for number, model in enumerate(whole.setting.grid.models):
        rows = [row for row in whole.rows if row["model"] in (model, "tiny-untrained")]
        part = bundle_part(whole, rows)
        part.write(tmp_path / str(number))
    joined = published(tmp_path / "0", tmp_path / "1")
    pd.testing.assert_frame_equal(joined.analysis.comparisons, published(folder).analysis.comparisons)
    # A model that several parts have was tried at the rates that each of them added.
    grid = replace(whole.setting.grid, learning_rates=(1e-3,), grows=True)
    for number, rates in enumerate(((3e-3,), (9e-3,))):
        own = replace(grid, added={("tiny-untrained", "sst2", ""): rates})
        rows = [row for row in whole.rows if row["learning_rate"] in own.rates_of(row["model"], "sst2", "")]
        bundle_part(replace(whole, setting=replace(whole.setting, grid=own)), rows).write(tmp_path / f"grown-{number}")
    both = published(tmp_path / "grown-0", tmp_path / "grown-1").analysis.grid
    assert both.added == {("tiny-untrained", "sst2", ""): (3e-3, 9e-3)} and both.grows
    other = bundle_part(whole, whole.rows, recipe={**whole.study["recipe"], "seed": 7})
    other.write(tmp_path / "other")
    with pytest.raises(UserError, match=r"not parts of one study.*recipe"):
        published(folder, tmp_path / "other")


def bundle_part(whole: Any, rows: Any, **changes: Any) -> Any:
    keys = pa.array([row["key"] for row in rows])
    tables = {task: table.filter(pc.is_in(table["key"], keys)) for task, table in whole.outcomes.tables.items()}
    return replace(whole, rows=rows, kept=Outcomes(tables, whole.outcomes.labels), study={**whole.study, **changes})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("results.csv", b"model\n", "bytes instead of"),
        ("bundle.json", None, "not a published study"),
        ("bundle.json", b'{"format": 2}', "format 2; this version of mlmclm reads format 1"),
        ("bundle.json", b'{"format": 1}', "bundle.json: facts: Field required"),
        ("cells.parquet", b"PAR1", "cells.parquet: not as mlmclm writes it"),
    ],
)
def test_a_damaged_or_foreign_bundle_is_the_users_to_replace(
    folder: Path, tmp_path: Path, name: str, content: bytes | None, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
        if name != "results.csv":  # whoever made it may have made the checksums too
            sums = json.loads((copy / "checksums.json").read_text())
            sums[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            (copy / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(SystemExit) as ended:
        main(["bundle", str(copy), str(folder), "--to", str(tmp_path / "joined")])
    error = capfd.readouterr().err
    assert ended.value.code == 2 and (said in error or (content is None and "not a bundle" in error))


def test_advice_on_a_bundle_has_the_price_of_pretraining_and_says_where_to_ask_for_more() -> None:
    folder = Path(__file__).parents[2] / "docs" / "replication" / "study-small-1k"
    found = published(folder)
    price, *_, edit = found.advice.open
    runs = int(price.partition(" pretraining runs of each model")[0].rpartition(" ")[2])
    stages = [each for each in found.record.states.stages if not each.title.endswith("seeds 1")]
    # Of six models, five have two runs, and the untrained one has one and needs no pretraining.
    rounds = (5 * (runs - 2) + runs - 1) / 6
    hours = rounds * sum(each.work.seconds * each.work.workers for each in stages) / 3600
    assert f", and their pretraining, about {hours:,.1f} worker hours on AMD EPYC." in price
    assert "into study.yaml of a copy of this bundle, and run `mlmclm study study.yaml`" in edit
    assert f"`replicates: {runs}`" in edit
    assert edit.endswith("; a store that lacks this study's models and cells computes them too.")


@pytest.mark.slow
def test_every_command_that_looks_takes_a_bundle(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["report", folder, "--to", tmp_path / "report"],
        ["claims", folder],
        ["advise", folder],
        ["compare", "tiny-mlm40-12", "tiny-untrained", "--study", folder],
        ["bundle", folder, folder, "--to", tmp_path / "joined"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        captured = capfd.readouterr()
        assert ended.value.code == 0, captured.err
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.slow
def test_cells_are_computed_again_and_equal_where_nothing_differs(
    made: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, whole = Place(made / "store", made / "data"), published(folder).record
    planted = next(row for row in whole.rows if row["model"] == "tiny-mlm40-12")
    check = replace(check_of(folder, 12, 0, place), rows=(planted,))
    assert check.pretrained == ()
    (found,) = check.run()
    # The planted score was not computed by this software.
    assert found.status == "differs elsewhere" and "scores differ" in found.detail and "other seeds" in found.detail

    (model,) = (each for each in models_in(place.store).values() if each.weights == planted["weights"])
    cell = recorded_cell(planted, replace(model, name=planted["model"]), (), where="")
    real = json.loads(canonical_json(run_cell(cell, store=place.store, data_root=place.data_root)))
    replace(whole, rows=[{**real, "setting": ""}], kept=Outcomes()).write(tmp_path / "real")
    assert [each.status for each in check_of(tmp_path / "real", 1, 0, place).run()] == ["equal"]

    # Elsewhere the model has to be pretrained, which here gives other weights.
    check = check_of(tmp_path / "real", 1, 0, Place(tmp_path / "empty", made / "data"))
    assert check.pretrained == ("tiny-mlm40-12",) and check.pretraining_hours == pytest.approx(12 / 3600)
    other = next(each for each in models_in(place.store).values() if each.folder != model.folder)
    monkeypatch.setattr(BundleCheck, "_made", lambda self: {"tiny-mlm40-12": other})
    (found,) = replace(check, place=place).run()
    assert found.status == "differs elsewhere" and "has other weights here" in found.detail
