"""A family is a declaration and its prepared tasks: nothing else names it, and another package brings one by an entry point."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import mlmclm
from mlmclm.backends.packing import Packing
from mlmclm.cli.main import main
from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.encoder import pool
from mlmclm.models.folder import load_tokenizer, weights_hash
from mlmclm.registry import KINDS, RegistryEntry
from mlmclm.reports import text
from mlmclm.results.examples import KeptExamples
from mlmclm.results.measures import Array, Measure, WeightedMean, correlation
from mlmclm.storage.place import Place
from mlmclm.sweeps.one_cell import one_cell
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declaration import FAMILIES, Task
from mlmclm.tasks.declared_tasks import get_task, task_names
from mlmclm.tasks.family import Family
from mlmclm.tasks.load import load_task
from mlmclm.tasks.look import preview_task
from mlmclm.tasks.metric import Metric
from mlmclm.tasks.predictions import predicted
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import Examples, Linear, PreparedTask, objects
from small_models import BAD, GOOD, save_small_model, write_table


class CountingTask(PreparedTask):
    """A task of counting: Poisson regression."""

    def head(self, hidden: int, linear: Linear) -> nn.Module:
        return linear(hidden, 1)

    def logarithms(self, head: nn.Module, hidden: Tensor, packing: Packing) -> Tensor:
        return head(pool(hidden, packing, self.settings.pooling)).float().squeeze(1)

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        found = self.logarithms(head, hidden, packing)
        return nn.functional.poisson_nll_loss(found, torch.from_numpy(targets["count"]).to(found))

    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        return list(self.logarithms(head, hidden, packing).exp().cpu().numpy())

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        gold, prediction = self.columns[split]["count"], np.array(predictions, dtype=np.float64)
        words = self.columns[split]["input_ids"].lengths
        return {"gold": gold, "prediction": prediction, "words": words, "within_one": abs(prediction - gold) <= 1}


class Counting(Family):
    """How often something occurs in a text."""

    name, title, prepared = "counting", "Counting", CountingTask
    columns: ClassVar = {"text": pa.string(), "count": pa.float64()}
    metrics: ClassVar = {"within_one": "share within one", "agreement": "correlation of counts"}
    signed = ("agreement",)
    gold_columns = ("gold",)

    @classmethod
    def measures(cls, columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
        sides = columns["gold"], columns["prediction"]
        return super().measures(columns, classes) | {"agreement": lambda weights: correlation(weights, *sides)}


class Another(Counting):
    """Has the other's name."""


DECLARATION = """
name: good-words
family: counting
title: How many good words a text has
source: local
folder: good
columns: {count: good}
splits: {train: train, validation_fraction: 0.1, test: test}
metric: within_one
licence: none
citation: none
"""


def install(place: Path, *lines: str) -> None:
    """A distribution whose entry points name families, as an installer leaves it."""
    folder = place / "outside-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("\n".join(["[mlmclm.families]", *lines]))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of packages; families are looked for anew, before and after."""
    monkeypatch.syspath_prepend(tmp_path)
    FAMILIES.forget()
    yield tmp_path
    FAMILIES.forget()


def write_counts(folder: Path) -> None:
    chance = random.Random(0)
    for split, rows in (("train", 400), ("test", 60)):
        good = [chance.randint(0, 6) for _ in range(rows)]
        texts = [" ".join(chance.choices(GOOD, k=count) + chance.choices(BAD, k=6 - count)) for count in good]
        write_table(folder, split, {"text": texts, "good": good})


@pytest.fixture
def cell(place: Path) -> Cell:
    """A cell on a task of a family that another package brings; its store is store/."""
    install(place, f"counting = {__name__}:Counting")
    write_counts(place / "data" / "good")
    model = save_small_model(place / "model")
    (place / "tasks").mkdir()
    (place / "tasks" / "good.yaml").write_text(DECLARATION)
    task = get_task("good-words", [place / "tasks"])
    protocol = Protocol(max_steps=120, max_length=32, stride=8, batch_size=16, weight_decay=0.0)
    made = prepare_task(task, model, protocol, place / "store", place / "data")
    cell = Cell("m", model, weights_hash(model), task.name, made.task_data, protocol, 5e-3, 0)
    return dataclasses.replace(cell, declaration=task)


def test_a_family_of_another_package_is_declared_looked_at_learned_and_reported(place: Path, cell: Cell) -> None:
    data = load_task(cell.declared, store=place, data_root=place / "data")
    shown = preview_task(data, load_tokenizer(cell.model_folder), cell.protocol)
    assert shown.rows == {"train": 360, "validation": 40, "test": 60}
    result = run_cell(cell, store=place / "store", data_root=place / "data")
    assert (result["family"], result["metric"]) == ("counting", "within_one")
    assert result["scores"]["test"]["within_one"] > 0.8  # 3 of 7 counts are within one of the best constant
    assert (text.family("counting"), text.metric("within_one")) == ("Counting", "share within one")
    assert (Counting.score_range("agreement"), Counting.score_range("agreement+within_one")) == ((-1, 1), (-0.5, 1))


def test_an_unknown_family_and_a_name_that_is_taken_are_refused(place: Path) -> None:
    (place / "good.yaml").write_text(DECLARATION.replace("family: counting", "family: retrieving"))
    with pytest.raises(
        UserError, match=r"family: unknown family 'retrieving'. Did you mean 'retrieval'\? Allowed: que"
    ):
        get_task("good-words", [place])
    install(place, f"counting = {__name__}:Counting", f"counting = {__name__}:Another")
    FAMILIES.forget()
    with pytest.raises(
        UserError, match=r"family 'counting': there are two of this name, from .*Another.* and from .*Counting"
    ):
        FAMILIES["counting"]
    assert "sst2" in task_names() and "counting" not in dict(FAMILIES.items()), "the others are there"


def test_declarations_and_reports_do_without_torch() -> None:
    script = (
        "import sys; from mlmclm.tasks.declared_tasks import find_tasks; from mlmclm.reports import text; find_tasks(); "
        "text.metric('f1'); print(sorted({'torch', 'transformers', 'sklearn', 'datasets', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Unsure(Family):
    """Has classes, and shows how sure a prediction is."""

    name, title, prepared = "unsure", "Unsure", CountingTask
    columns: ClassVar = {"text": pa.string(), "label": pa.int64()}
    metrics: ClassVar = {"right": "share that is right"}
    labels = "label"
    shown: ClassVar = {"id": "id", "prediction": "prediction", "right": "right", "sure": "sure", "of_each": "of_each"}


def test_only_numbers_of_classes_get_names_in_a_file_of_predictions() -> None:
    columns = {"prediction": np.array([1], np.uint8), "right": np.array([True]), "sure": np.array([0.75])}
    texts = {"id": objects(["a"]), "of_each": objects([np.array([0.25, 0.75])])}
    mlmclm.register("family", None, Unsure)
    try:
        (row,) = predicted(KeptExamples({"family": "unsure"}, columns, ("bad", "good"), texts))
    finally:
        FAMILIES.remove("unsure")
    assert row == {"id": "a", "prediction": "good", "right": True, "sure": 0.75, "of_each": [0.25, 0.75]}


def test_a_prepared_task_which_cells_share_cannot_be_changed() -> None:
    made = CountingTask("key", Path(), "counting", "data", (), Protocol())
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.settings = Protocol(max_length=8)  # type: ignore[misc]
    assert {made: 1}[made] == 1


class Exact(Metric):
    """The share of counts that are right when rounded."""

    name, title, family = "exact", "exact counts", "counting"

    @classmethod
    def measure(cls, columns: Mapping[str, Array], classes: int) -> Measure:
        return WeightedMean((np.round(columns["prediction"]) == columns["gold"]).astype(float))


def test_a_registered_metric_is_a_task_s_and_its_code_is_in_the_keys_of_its_cells(cell: Cell, place: Path) -> None:
    key = cell_key(cell)
    assert cell.added == {"family": FAMILIES.keyed("counting")}
    mlmclm.register("metric", None, Exact)
    try:
        declaration = parse_config(Task, cell.declared.model_dump() | {"metric": "exact+within_one"}, where="here")
        own = dataclasses.replace(cell, declaration=declaration)
        assert cell_key(cell) == key != cell_key(own)
        result = run_cell(own, store=place / "store", data_root=place / "data")
        assert 0 < result["scores"]["test"]["exact"] <= result["scores"]["test"]["within_one"]
        assert text.metric("exact") == "exact counts" and Counting.score_range("exact") == (0, 1)
    finally:
        KINDS["metric"].remove("exact")
    with pytest.raises(UserError, match="metric 'exact' is not computed for counting; allowed: within_one, agreement"):
        parse_config(Task, cell.declared.model_dump() | {"metric": "exact"}, where="here")


def changed(**parts: Any) -> dict[str, Any]:
    """Attributes of a family whose prepared tasks have these methods in place of their own."""
    return {"prepared": type("Changed", (CountingTask,), parts)}


def without_gold(self: CountingTask, split: str, predictions: Sequence[Array]) -> Examples:
    return {"within_one": np.ones(len(predictions)), "prediction": np.array(predictions, dtype=np.float64)}


def too_few(self: CountingTask, *arguments: Any) -> list[Array]:
    return CountingTask.predict(self, *arguments)[:-1]


INCOMPLETE: dict[str, tuple[dict[str, Any], str]] = {
    "without `shown`": (
        {
            **changed(examples=without_gold),
            "gold_columns": (),
            "measures": Family.measures,
            "metrics": {"within_one": "w"},
            "signed": (),
        },
        r"predictions in files \(`shown`\): .*no gold",
    ),
    "gold columns": ({"gold_columns": ("gold", "golden")}, "no golden, which `gold_columns` has"),
    "a metric that is not computed": (
        {"measures": Family.measures, "signed": (), "scores": lambda *_: {}},
        "'within_one'",
    ),
    "a score outside its range": (
        {"scores": lambda *_: {"within_one": 7.5}},
        "within_one is 7.5, and not between 0 and 1",
    ),
    "two definitions of a score": ({"scores": lambda *_: {"within_one": 0.5}}, "and `scores` has 0.5"),
    "a loss that fails": (changed(loss=lambda *_: 1 / 0), "head, loss and predictions .*: ZeroDivisionError"),
    "too few predictions": (changed(predict=too_few), "`predict` gives 59 predictions of 60 sequences"),
    "chance": (changed(blind=lambda self: [("always 1", {})]), r"the level of chance \(`blind`\)"),
}


def test_a_family_that_a_later_step_could_not_use_is_refused_before_anything_is_computed(
    cell: Cell, place: Path
) -> None:
    own, folders = str(cell.model_folder), Place(place / "store", place / "data", (place / "tasks",))
    for number, (parts, said) in enumerate(INCOMPLETE.values()):
        name = f"odd{number}"
        parts = {part: staticmethod(value) if part == "scores" else value for part, value in parts.items()}
        odd = type(
            "Odd", (Counting,), {"name": name, **parts}
        )  # without a source, so its code is said, as for a worker
        FAMILIES.add(RegistryEntry(name, odd, "here", code=name, place=(__name__, name)))
        declaration = DECLARATION.replace("counting", name).replace("good-words", f"{name}-words")
        (place / "tasks" / f"{name}.yaml").write_text(declaration)
        try:
            for prepare in (False, True) if number == 0 else (True,):
                with pytest.raises(UserError, match=f"task {name}-words, of family '{name}' from .*: .*{said}"):
                    one_cell(own, f"{name}-words", 1e-3, folders, prepare=prepare)
        finally:
            (place / "tasks" / f"{name}.yaml").unlink()
            FAMILIES.remove(name)


@pytest.mark.parametrize(
    ("kind", "parts", "said"),
    [
        ("family", {"title": None}, "has title = None: Input should be a valid string"),
        ("family", {"metrics": {}}, "has no 'metrics'"),
        ("family", {"signed": ("accord",)}, "has no accord in 'metrics', which 'signed' or 'study_metric' names"),
        ("family", {"shown": {"prediction": "prediction"}}, "needs the gold answer and the prediction in 'shown'"),
        ("family", {"prepared": PreparedTask}, "has a 'prepared' that does not define examples, head, loss, predict"),
        ("metric", {"name": "f1", "measure": len}, "has the name of a score that .*question-answering.* has already"),
        ("metric", {"title": "t"}, "does not define measure"),
        ("figure", {"draw": len, "section": "nowhere"}, "has section = 'nowhere': Input should be 'top', 'answer'"),
        ("optimizer", {}, "does not define build"),
        ("objective", {"causal": "yes?"}, "does not define .*; has causal = 'yes\\?'"),
        ("reader", {"recognises": len, "runs": len}, "has no 'title'"),
    ],
)
def test_an_incomplete_member_is_refused_when_it_is_registered(kind: str, parts: dict[str, Any], said: str) -> None:
    base = Counting if kind == "family" else KINDS[kind]._type
    known = {"name": "mine", **({"family": "counting"} if kind == "metric" else {})}
    with pytest.raises(UserError, match=f"{kind} '.*' from .* {said}"):
        mlmclm.register(kind, None, type("Mine", (base,), {**known, **parts}))
    assert "mine" not in KINDS[kind]


def test_cells_of_such_a_family_are_compared_by_scores_of_its_own(
    place: Path, cell: Cell, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its columns have names of the package's families, and other meanings."""
    results_store, results = ResultsStore(place / "store"), []
    for steps in (40, 5):
        own = dataclasses.replace(cell, protocol=cell.protocol.model_copy(update={"max_steps": steps}))
        results.append(
            run_cell(own, store=place / "store", data_root=place / "data", on_examples=results_store.write_examples)
        )
        results_store.write(results[-1])
    scores = [result["scores"]["test"] for result in results]

    def compare(metric: str) -> tuple[int, str, str]:
        keys = [result["key"] for result in results]
        with pytest.raises(SystemExit) as ended:
            main(["compare", *keys, "--metric", metric, "--store", str(place / "store"), "--json"])
        return int(ended.value.code or 0), *capfd.readouterr()

    for metric, test in (
        ("within_one", "mcnemar"),
        ("agreement", "t"),
        ("within_one+agreement", "t"),
    ):
        code, output, errors = compare(metric)
        assert code == 0, errors
        (found,) = json.loads(output)["tasks"]
        wanted = [np.mean([score[name] for name in metric.split("+")]) for score in scores]
        assert [found["first"], found["second"]] == pytest.approx(wanted)
        assert (found["test"], found["low"] <= found["difference"] <= found["high"]) == (test, True)
    shutil.rmtree(place / "outside-1.0.dist-info")
    FAMILIES.forget()
    code, _, errors = compare("within_one")
    assert (code, "no installed package has its family 'counting'" in " ".join(errors.split())) == (2, True), errors
