"""A record that a stranger made is read whole or refused with one message; it opens no connection and writes nothing of its own."""

from __future__ import annotations

import copy
import csv
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from scipy import stats

from mlmclm.answers.received_study import ELSEWHERE, KEYS, check_study, kept_inside, leads_out
from mlmclm.cli.main import main
from mlmclm.configuration import Role
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.errors import UserError
from mlmclm.results.intervals import most_wrong
from mlmclm.storage.place import Place
from mlmclm.studies.api import published
from mlmclm.studies.recompute import Recomputed, check_of
from mlmclm.studies.study_file import StudyFile, SweepFile, load_file
from small_record import copied, edit_json, edit_rows, make_record, read_rows, seal, small_record

Edit = Callable[[Path], Any]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("record") / "published")


def call(words: list[Any], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    captured = capfd.readouterr()
    assert "unexpected error" not in captured.err and "Traceback" not in captured.err, captured.err
    return int(ended.value.code or 0), captured.out + captured.err


def in_study(**changes: Any) -> Edit:
    """Changes study.yaml; a name with __ leads into a mapping."""

    def edit(folder: Path) -> None:
        values = yaml.safe_load((folder / "study.yaml").read_text())
        for name, value in changes.items():
            *outer, last = name.split("__")
            place = values
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = value
        (folder / "study.yaml").write_text(yaml.safe_dump(values))
        seal(folder)

    return edit


def in_first_row(edit: Callable[[dict[str, Any]], Any]) -> Edit:
    return lambda folder: edit_rows(folder, lambda rows: edit(rows[0]))


def test_score(value: Any) -> Edit:
    return in_first_row(lambda row: row["scores"]["test"].update(accuracy=value))


test_score.__test__ = False  # type: ignore[attr-defined]


def in_about(edit: Callable[[Any], Any]) -> Edit:
    return lambda folder: edit_json(folder, "bundle.json", edit)


def text(name: str, content: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
        seal(folder)

    return edit


def named(name: str) -> Edit:
    """A file's name in the checksums that is not the file's place."""
    return lambda folder: seal(folder, **{name: "study.yaml"})


def linked(name: str, target: Callable[[Path], Path]) -> Edit:
    def edit(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        place = target(folder)
        if place.parent != folder.parent:
            place = folder.parent / place.name
        place.write_bytes(content)
        (folder / name).symlink_to(place)

    return edit


def pipe(folder: Path) -> None:
    (folder / "results.csv").unlink()
    os.mkfifo(folder / "results.csv")


def link_beside(folder: Path) -> None:
    (folder / "folder-one").symlink_to(folder.parent)


def tasks_beside(folder: Path) -> None:
    (folder / "tasks").mkdir()
    (folder / "tasks" / "own.yaml").write_text("name: own\n")


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def forged(folder: Path, *, table: bool = False, examples: bool = False) -> None:
    """Adds 25 points to a few test scores: in the cells, and in results.csv or in the examples too."""
    keys = [row["key"] for row in read_rows(folder) if row["scores"]["test"]["accuracy"] < 0.7][:3]

    def more(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["key"] in keys:
                row["scores"]["test"]["accuracy"] += 0.25

    edit_rows(folder, more)
    if table:
        forge_table(folder, keys)
    if examples:
        file = folder / "examples" / "sst2.parquet"
        rows = pq.read_table(file).to_pylist()
        for key in keys:
            wrong = [row for row in rows if row["key"] == key and not row["correct"]]
            for row in wrong[:10]:
                row["correct"] = True
        pq.write_table(pa.Table.from_pylist(rows), file)
        seal(folder)


def forge_table(folder: Path, keys: list[str]) -> None:
    lines = (folder / "results.csv").read_text().splitlines()
    at = lines[0].split(",").index("test")
    for number, line in enumerate(lines):
        cells = line.split(",")
        if cells[-1] in keys:
            cells[at] = repr(float(cells[at]) + 0.25)
            lines[number] = ",".join(cells)
    (folder / "results.csv").write_text("\n".join(lines) + "\n")
    seal(folder)


def refitted(folder: Path, *, fewer: bool) -> None:
    """Makes a cell's answers all right, by leaving out its wrong ones or by other gold, and its scores in all files fit."""
    file = folder / "examples" / "sst2.parquet"
    rows = pq.read_table(file).to_pylist()
    key = rows[0]["key"]
    for row in [row for row in rows if row["key"] == key and not row["correct"]]:
        if fewer:
            rows.remove(row)
        row.update(gold=row["prediction"], correct=True)
    pq.write_table(pa.Table.from_pylist(rows), file)

    def perfect(cells: list[dict[str, Any]]) -> None:
        scores = next(cell["scores"]["test"] for cell in cells if cell["key"] == key)
        scores.update(dict.fromkeys(scores, 1.0))

    edit_rows(folder, perfect)
    table = list(csv.DictReader((folder / "results.csv").open(newline="")))
    changed = next(row for row in table if row["key"] == key)
    changed.update({name: "1.0" for name in changed if name.startswith("test")})
    with (folder / "results.csv").open("w", newline="") as sink:
        writer = csv.DictWriter(sink, list(changed))
        writer.writeheader()
        writer.writerows(table)
    seal(folder)


def edit_examples(folder: Path, edit: Callable[[pa.Table], pa.Table]) -> None:
    file = folder / "examples" / "sst2.parquet"
    pq.write_table(edit(pq.read_table(file)), file)
    seal(folder)


def turned_labels(folder: Path) -> None:
    table = pq.read_table(folder / "cells.parquet").to_pylist()
    table[0]["labels"].reverse()
    pq.write_table(pa.Table.from_pylist(table), folder / "cells.parquet")
    seal(folder)


def mixed_examples(folder: Path) -> None:
    edit_examples(folder, lambda table: table.take(np.random.default_rng(0).permutation(table.num_rows)))


ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" if n else "a0: &a0 [x]\n" for n in range(9))
HOSTILE: dict[str, tuple[Edit, str]] = {
    "a name that climbs from a folder": (named("tasks/../../mine.yaml"), "does not belong"),
    "an absolute name": (named("/tmp/mine.yaml"), "does not belong"),
    "a name with a line break": (named("tasks/mi\nne.yaml"), "does not belong"),
    "a hidden name": (named("tasks/.mine.yaml"), "does not belong"),
    "a name of no kind": (named("more.sh"), "does not belong"),
    "checksums that are a list": (lambda f: (f / "checksums.json").write_text("[]"), "expected the bytes and sha256"),
    "checksums without sizes": (lambda f: (f / "checksums.json").write_text('{"study.yaml": {}}'), "expected the bytes"),
    "sizes of any number": (
        lambda f: (f / "checksums.json").write_text('{"study.yaml": {"bytes": NaN, "sha256": ""}}'),
        "not JSON as it is expected",
    ),
    "more than fits into memory": (
        lambda f: (f / "checksums.json").write_text(json.dumps({"study.yaml": {"bytes": 1 << 40, "sha256": ""}})),
        "the most that is read",
    ),
    "a file that links out": (linked("results.csv", lambda f: f.parent / "mine.csv"), "leads out of the folder"),
    "a folder that links out": (link_beside, "leads out of the folder"),
    "a pipe": (pipe, "not a regular file"),
    "tasks that were added": (tasks_beside, "it has been added"),
    "settings of any depth": (in_first_row(lambda row: row["protocol"].update(more=nested(900))), "(nested too deeply)"),
    "a file that is missing": (lambda f: (f / "results.csv").unlink(), "missing, or not a regular file"),
    "an address to track at": (in_study(tracking="http://localhost:1"), "unknown key of a record's study 'tracking'"),
    "shards at a place": (in_study(corpus__shards="mine"), "shards is about the machine"),
    "a cache": (in_study(corpora__a__cache="mine"), "cache is about the machine"),
    "a corpus elsewhere": (in_study(corpus__source="/home/mine"), "an absolute path"),
    "a corpus at an address": (in_study(corpus__source="s3://bucket/mine"), "an address"),
    "a model that climbs": (in_study(models=["one=../mine", "two"]), "one with '..'"),
    "a search space elsewhere": (in_study(space="mine/space.yaml"), "not one of the record's"),
    "a protocol elsewhere": (in_study(space__protocol={"base": "mine/own.yaml"}), "not one of the record's"),
    "claims elsewhere": (in_study(claims=["mine.yaml"]), "not one of the record's"),
    "code of the harness": (
        lambda f: (text("own.yaml", "task: own\n")(f), (f / "checksums.json").write_bytes(b"{}"), seal_without(f, "own.yaml"),
                   in_zero_shot(f)),
        "may hold code",
    ),
    "a callback": (in_study(recipe={"callbacks": ["mine"]}, corpus={"source": "texts"}), "unknown callback"),
    "a server of DeepSpeed": (in_study(recipe__deepspeed={"wandb": {"enabled": True}}), "wandb is about the machine"),
    "a disk of DeepSpeed": (
        in_study(recipe__deepspeed={"zero_optimization": {"offload_param": {"device": "nvme"}}}),
        "unknown word 'nvme'",
    ),
    "a description that writes to the terminal": (in_study(space__description="a\x1b[2Jb"), "control a terminal"),
    "a title that writes to the terminal": (
        in_about(lambda about: about["facts"]["tasks"][0].update(title="a\x1b[2Jb")),
        "control a terminal",
    ),
    "models that the study lacks": (in_study(models=["one", "three"]), "two of bundle.json are not among them"),
    "an unknown key": (in_study(plugins=["mine"]), "unknown key of a record's study"),
    "aliases of aliases": (text("study.yaml", ALIASES), "stands for more than"),
    "a very long file": (text("claims/own.yaml", "# x\n" * 400_000), "at most"),
    "a tag of Python's": (text("study.yaml", "name: !!python/name:os.getcwd\n"), "not valid YAML"),
    "a study that is a list": (text("study.yaml", "- one\n"), "expected a mapping"),
    "a score as text": (test_score("0.9"), "scores.test.accuracy: Input should be a valid number"),
    "a score that is true": (test_score(True), "Input should be a valid number"),
    "a score of many points": (test_score(7.5), "less than or equal to 1"),
    "a score of any size": (test_score(1e300), "at most 1e+30"),
    "a score that is no number": (test_score(float("nan")), "numbers are finite"),
    "an accuracy below 0": (test_score(-0.5), "allowed: 0 to 1"),
    "scores of a diverged cell": (in_first_row(lambda row: row.update(status="diverged")), "a diverged cell alone has none"),
    "a cell without scores": (in_first_row(lambda row: row.update(scores=None)), "a diverged cell alone has none"),
    "an unknown status": (in_first_row(lambda row: row.update(status="fine")), "'ok' or 'diverged'"),
    "a metric that was not computed": (in_first_row(lambda row: row.update(metric="bleu")), "has no bleu"),
    "a learning rate of 0": (in_first_row(lambda row: row.update(learning_rate=0)), "learning_rate"),
    "a seed that is true": (in_first_row(lambda row: row.update(seed=True)), "seed"),
    "a seed outside the grid": (in_first_row(lambda row: row.update(seed=9)), "its seed 9 is not in the grid"),
    "a rate so small that ratios overflow": (
        in_about(lambda about: about["grid"]["learning_rates"].append(1e-320)), "learning_rates.2: Input should be greater than",
    ),
    "a grid of more cells than can be planned": (
        in_about(lambda about: about["grid"].update(seeds=[*range(250_001)])), "its grid has 1,000,004 cells; at most 1,000,000",
    ),
    "two names": (in_about(lambda about: about["facts"].update(name="other")), "its name is 'other' in bundle.json, and 'record' in study"),
    "labels in two orders": (turned_labels, "its labels are not those of another cell of the task"),
    "no time": (in_first_row(lambda row: row["cost"].update(finished="soon")), "cost.finished"),
    "a model's name that climbs": (in_first_row(lambda row: row.update(model="../one")), "model"),
    "other weights": (in_first_row(lambda row: row.update(weights="0" * 64)), "weights is 000"),
    "other data": (in_first_row(lambda row: row.update(task_data="0" * 64)), "task_data is 000"),
    "a cell twice": (lambda f: edit_rows(f, lambda rows: rows[1].update(rows[0])), "the result itself says key"),
    "a grid of another type": (in_about(lambda about: about["grid"].update(models="one")), "bundle.json: grid.models"),
    "a grid without a model": (in_about(lambda about: about["grid"].update(models=["one"])), "are not the same"),
    "a chance level of 5": (in_about(lambda about: about["chances"]["sst2"].update(score=5)), "bundle.json: chances.sst2.score"),
    "an unknown rule": (in_about(lambda about: about.update(rule="best")), "bundle.json: rule"),
    "an unknown baseline": (in_about(lambda about: about.update(baseline="three")), "unknown name in baseline 'three'"),
    "a key of JSON twice": (
        lambda f: ((f / "states.json").write_text('{"weights": {}, "weights": {}}'), seal(f)),
        "is there twice",
    ),
    "states that are a list": (text("states.json", "[]"), "states.json: Input should be an object (got [])"),
    "JSON of any depth": (lambda f: ((f / "states.json").write_text("[" * 100_000), seal(f)), "nested too deeply"),
    "a name longer than a file's can be": (named(f"tasks/{'x' * 300}.yaml"), "at most 200 bytes"),
    "a fact of another type": (in_about(lambda about: about["facts"]["models"][0].update(steps="x")), "bundle.json: facts.models.0.steps"),
    "a grid with a rate twice": (in_about(lambda about: about["grid"]["learning_rates"].append(1e-3)), "grid.learning_rates has one twice"),
    "rates of a model that is none": (
        in_about(lambda about: about["grid"].update(added=[["three", "sst2", "", [0.1]]])),
        "unknown name in grid.added 'three'",
    ),
    "seeds by task": (in_about(lambda about: about["grid"].update(allotted={"mnli": [0]})), "grid.allotted.mnli"),
    "a chance level of a task that is none": (
        in_about(lambda about: about["chances"].update(mnli={"score": 0.5, "how": ""})),
        "unknown name in chances 'mnli'",
    ),
    "a replicate of itself": (in_about(lambda about: about.update(replicate_of={"one": "one"})), "replicate_of 'one'"),
    "another metric than the task's": (
        in_about(lambda about: about["facts"]["tasks"][0].update(metric="f1")),
        "metric is accuracy, and f1 in bundle.json",
    ),
    "another family than the task's": (
        in_about(lambda about: about["facts"]["tasks"][0].update(family="retrieval")),
        "family is sequence-classification, and retrieval in bundle.json",
    ),
    "cells that are no table": (text("cells.parquet", "PAR1"), "cells.parquet: not as mlmclm writes it (ArrowInvalid"),
    "a table that ends in a quote": (lambda f: text("results.csv", (f / "results.csv").read_text() + '"')(f), "contradict each other in 1 line"),
    "examples without gold": (
        lambda f: edit_examples(f, lambda table: table.drop_columns(["gold"])),
        "examples/sst2.parquet: not as mlmclm writes it (KeyError: 'gold')",
    ),
    "keys of examples that are numbers": (
        lambda f: edit_examples(f, lambda table: table.set_column(0, "key", pa.array(range(table.num_rows)))),
        "examples/sst2.parquet: key '0' is not that of a scored cell",
    ),
    "claims of no kind": (
        lambda f: (text("claims/own.yaml", "colour: red\n")(f), in_study(claims=["claims/own.yaml"])(f)),
        "own.yaml",
    ),
    "a number of any length": (lambda f: ((f / "states.json").write_text("1" * 10_000), seal(f)), "a number of 10,000 digits"),
    "a table without scores": (text("results.csv", "model,key\none,two\n"), "results.csv and cells.parquet contradict each other"),
    "scores in the cells alone": (forged, "contradict each other in 3 lines"),
    "scores in the table alone": (
        lambda f: forge_table(f, [read_rows(f)[0]["key"]]),
        "results.csv and cells.parquet contradict each other in 1 line",
    ),
    "scores in cells and table": (lambda f: forged(f, table=True), "the test examples and cells.parquet contradict each other in 3 cells"),
    "wrong answers that one cell lacks": (lambda f: refitted(f, fewer=True), "different examples (numbers of examples differ)"),
    "other right answers in one cell": (lambda f: refitted(f, fewer=False), "different examples (column gold differ)"),
    "answers that are not right": (lambda f: forged(f, table=True, examples=True), "is not correct as its row says"),
    "a path as bytes": (
        lambda f: ((f / "study.yaml").write_text((f / "study.yaml").read_text() + "claims: [!!binary L2Fycw==]\n"), seal(f)),
        "it has a bytes",
    ),
    "a space that names a file elsewhere": (
        lambda f: (
            (f / "tasks").mkdir(exist_ok=True),
            (f / "tasks" / "space.yaml").write_text("tasks: [sst2]\nprotocol: /a/protocol.yaml\n"),
            seal(f),
        ),
        "is an address, an absolute path, or one with '..'",
    ),
    "examples in any order": (mixed_examples, "the rows of each key must be together"),
}  # fmt: skip


def seal_without(folder: Path, name: str) -> None:
    seal(folder)
    sums = json.loads((folder / "checksums.json").read_text())
    del sums[name]
    (folder / "checksums.json").write_text(json.dumps(sums))


def in_zero_shot(folder: Path) -> None:
    in_study(zero_shot={"tasks": ["own.yaml"]})(folder)
    seal_without(folder, "own.yaml")


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_record_is_refused_and_nothing_is_written(record: Path, tmp_path: Path, what: str) -> None:
    folder = copied(record, tmp_path / "copy")
    edit, said = HOSTILE[what]
    edit(folder)
    before = everything(tmp_path)
    with pytest.raises(UserError, match=re.escape(said)):
        published(folder)
    assert everything(tmp_path) == before


def test_a_file_beside_the_folder_that_is_written_is_never_replaced(
    record: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The name is that of a file where the record lies, and leads to another one where its copy would lie."""
    folder = copied(record, tmp_path / "received" / "copy")
    text("tasks/own.yaml", "name: own\n")(folder)
    (folder.parent / "mine.yaml").write_text("theirs: 1\n")
    (tmp_path / "mine.yaml").write_text("mine: 1\n")
    seal(folder, **{"tasks/../../mine.yaml": "../mine.yaml"})
    code, error = call(["bundle", folder, "--to", tmp_path / "joined"], capfd)
    assert code == 2 and "does not belong" in error
    assert (tmp_path / "mine.yaml").read_text() == "mine: 1\n" and not (tmp_path / "joined").exists()


def test_forged_scores_are_caught_by_every_command_before_anything_is_computed(
    record: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copied(record, tmp_path / "copy")
    forged(folder, table=True)
    for words in (
        ["report", folder, "--to", tmp_path / "report"],
        ["bundle", "verify", folder, "--store", tmp_path / "store"],
        ["compare", "one", "two", "--study", folder],
        ["claims", folder],
        ["advise", folder],
    ):
        code, error = call(words, capfd)
        assert code == 2 and "the test examples and cells.parquet contradict each other in 3 cells" in error, error
    assert not (tmp_path / "report").exists() and not (tmp_path / "store").exists()


def everything(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_parts_may_list_their_models_or_name_them(record: Path, tmp_path: Path) -> None:
    listed = copied(record, tmp_path / "listed")
    in_study(models=["folder/one", "folder/two"])(listed)
    assert len(published(record, listed).record.rows) == len(published(listed, record).record.rows) == 12


def test_an_honest_record_has_the_bytes_that_it_was_made_with(record: Path) -> None:
    assert published(record).record.contents() == small_record().contents()


@pytest.mark.parametrize("name", ["study-small-1k", pytest.param("study-small", marks=pytest.mark.slow), "ettin-small"])
def test_the_replications_of_this_project_are_read(name: str) -> None:
    folder = Path(__file__).parents[2] / "docs" / "replication" / name
    found = check_of(folder, 3, 0, Place(Path("nowhere"), None))
    assert found.keys == len(found.record.rows), "every key can be made again"


def test_a_record_in_the_cache_of_the_hub_is_read_through_its_links(record: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "datasets--a--b" / "snapshots" / "c0ffee", tmp_path / "datasets--a--b" / "blobs"
    copied(record, snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.rglob("*"))):
        if path.is_file():
            blob = path.rename(blobs / str(number))
            path.symlink_to(os.path.relpath(blob, path.parent))
    assert published(snapshot).record.contents() == small_record().contents()


def test_a_key_that_is_not_that_of_its_cell_is_refused_before_cells_are_computed(record: Path, tmp_path: Path) -> None:
    folder = copied(record, tmp_path / "copy")
    edit_rows(folder, lambda rows: rows[0]["protocol"].update(max_steps=3))
    published(folder)
    with pytest.raises(UserError, match=r"1 cell of 12 have keys that don't belong to their settings"):
        check_of(folder, 3, 0, Place(tmp_path / "store", None))


def test_cells_to_verify_are_others_each_time_unless_a_seed_is_given(
    record: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def chosen(*more: str) -> dict[str, Any]:
        options = ["--cells", "4", "--dry-run", "--json", "--store", tmp_path / "store", *more]
        _, printed = call(["bundle", "verify", record, *options], capfd)
        return dict(json.loads(printed[printed.index("{") : printed.rindex("}") + 1]))

    found = [chosen() for _ in range(4)]
    assert len({each["seed"] for each in found}) > 1 and len({tuple(each["cells"]) for each in found}) > 1
    again = chosen("--seed", str(found[0]["seed"]))
    assert again == found[0] and again["cells_of_all"] == 12 == again["keys_made_again"]


def test_a_cell_that_confirms_nothing_counts_as_wrong(record: Path, tmp_path: Path) -> None:
    check = check_of(record, 4, 0, Place(tmp_path / "store", None))
    equal, elsewhere = (Recomputed("", "", status) for status in ("equal", "differs elsewhere"))
    assert check.at_most_wrong([equal] * 12) == 0
    assert check.at_most_wrong([equal] * 4) == most_wrong(12, 4, 0) / 12 == 5 / 12
    assert check.at_most_wrong([equal] * 3 + [elsewhere]) == most_wrong(12, 4, 1) / 12
    assert check.at_most_wrong([elsewhere] * 4) == 1


@pytest.mark.parametrize(
    ("total", "checked", "wrong"), [(333, 10, 0), (333, 10, 1), (12, 12, 0), (12, 12, 3), (40, 1, 0), (9, 5, 2)]
)
def test_the_share_of_wrong_cells_is_the_exact_bound_of_a_sample(total: int, checked: int, wrong: int) -> None:
    """The largest number of wrong cells of which scipy finds so few in more than 5 % of samples."""
    possible = range(wrong, total - (checked - wrong) + 1)
    expected = max(
        bad for bad in possible if stats.hypergeom.cdf(wrong, total, bad, checked) > 0.05 - 1e-9 or bad == wrong
    )
    assert most_wrong(total, checked, wrong) == expected


def test_every_key_of_a_study_is_allowed_in_a_record_or_about_a_machine() -> None:
    for kind in (StudyFile, SweepFile):
        assert set(kind.model_fields) <= {*KEYS, *ELSEWHERE}
    for kind in (StudyFile, SweepFile, CorpusConfig, TokenizerConfig):
        places = {
            name
            for name, field in kind.model_fields.items()
            if Role.WORK in field.metadata and field.annotation == str | None
        }
        assert places <= set(ELSEWHERE), "a text about where something is computed is not published"


def test_what_is_published_names_nothing_outside() -> None:
    own = {
        "name": "own",
        "corpus": {"source": "../texts/"},
        "initial": {"a": "~/models/a", "b": "OWNER/NAME@v1"},
        "models": ["2m-clm-25%-mlm40-1k"],
        "card": {"citation": "@misc{a, url = {https://example.org/../a}}"},
    }
    made = kept_inside(own)
    check_study(made, Path("study.yaml"), ())
    assert made == {
        **own,
        "corpus": {"source": "texts"},
        "initial": {"a": "a", "b": "OWNER/NAME@v1"},
    }
    assert [leads_out(each) for each in ("a/b", "a..b", "C:\\a", "file:/a", "a=b/../c", "2m-clm-1k")] == [
        False, False, True, True, True, False,
    ]  # fmt: skip


def test_a_study_is_run_from_a_record_only_if_it_names_nothing_outside(record: Path, tmp_path: Path) -> None:
    folder = copied(record, tmp_path / "copy")
    assert load_file(folder / "study.yaml").name == "record"
    in_study(tracking="http://localhost:1")(folder)
    with pytest.raises(UserError, match="tracking"):
        load_file(folder / "study.yaml")


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename": 1, "os.mkdir": 0, "os.symlink": 1, "os.link": 1, "os.remove": 0}
"""Events of the audit, and the number of the argument that is the path."""


class Watch:
    """What a process does besides reading: connections, files opened for writing, and modules from some folders."""

    def __init__(self) -> None:
        self.on = False
        self.connected: list[Any] = []
        self.written: list[str] = []
        self.imported: list[str] = []
        sys.addaudithook(self)  # for good, so that it is switched off after use

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
            self.connected.append(arguments)
        elif event == "open" and isinstance(arguments[0], str | os.PathLike) and arguments[2] & WRITING:
            self.written.append(str(Path.cwd() / arguments[0]))
        elif event in CHANGES:
            self.written.append(str(Path.cwd() / os.fspath(arguments[CHANGES[event]])))
        elif event == "import" and isinstance(arguments[1], str):
            self.imported.append(arguments[1])


@contextmanager
def watched(watch: Watch, *allowed: Path) -> Iterator[None]:
    """Fails if something is connected to, written outside of `allowed`, or imported from there."""
    watch.connected, watch.written, watch.imported, watch.on = [], [], [], True
    try:
        yield
    finally:
        watch.on = False
    assert not watch.connected
    outside = [path for path in watch.written if not any(Path(path).is_relative_to(folder) for folder in allowed)]
    assert not [path for path in outside if path != os.devnull and "__pycache__" not in path], outside
    assert not [path for path in watch.imported if any(Path(path).is_relative_to(folder) for folder in allowed)]


@pytest.fixture(scope="session")
def watch() -> Watch:
    return Watch()


HARMLESS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7.5, 1e300, 10**40, "", "0.9", "nan", "=1+1", "../up", "/abs/name", "~name", "a/b", "line\nbreak",
    "tab\t", "http://localhost/name", "name\u202e", "x" * 5000, [], {}, [1, 2], {"a": 1}, [[]], "ok", "diverged", "one", "sst2", "accuracy",
)  # fmt: skip


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of a value with one change at any depth: another value, one key or item less, more or twice."""
    changed = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        for key, each in inner.items() if isinstance(inner, dict) else enumerate(inner):
            places.append((inner, key))
            if isinstance(each, dict | list):
                walk(each)

    walk(changed)
    inner, key = chance.choice(places)
    how = chance.choice(("other", "other", "other", "less", "more", "twice", "renamed"))
    if how == "less":
        del inner[key]
    elif isinstance(inner, list) and how != "other":
        inner.insert(key, chance.choice(HARMLESS) if how == "more" else copy.deepcopy(inner[key]))
    elif how == "more":
        inner[str(chance.choice(HARMLESS))[:40]] = chance.choice(HARMLESS)
    elif how == "renamed" and isinstance(inner, dict):
        inner[str(chance.choice(HARMLESS))[:40]] = inner.pop(key)
    else:
        inner[key] = chance.choice(HARMLESS)
    return changed


def dumped(value: Any) -> str:
    return json.dumps(value)


def spoil(folder: Path, chance: random.Random) -> str:
    """Changes one thing in a record, and says in which file."""
    files = ("study.yaml", "bundle.json", "states.json", "cells", "cells", "examples", "results.csv", "checksums.json")
    name = chance.choice((*files, "bytes"))
    path = folder / name
    if name == "cells":
        edit_rows(folder, lambda rows: rows.__setitem__(slice(None), mutated(rows, chance)[: len(rows)] or rows))
    elif name == "examples":
        path = folder / "examples" / "sst2.parquet"
        rows = pq.read_table(path).to_pylist()
        row = chance.choice(rows)
        column = chance.choice(list(row))
        how = chance.choice(("column", "value", "rename", "rows"))
        table = pa.Table.from_pylist(rows)
        if how == "column":
            table = table.drop_columns([column])
        elif how == "rename":
            table = table.rename_columns([chance.choice(("gold", "key", "=1", each)) for each in table.column_names])
        elif how == "rows":
            table = table.slice(chance.randrange(len(rows)))
        else:
            row[column] = chance.choice({"key": ("a" * 64, ""), "correct": (True, False)}.get(column, (99,)))
            table = pa.Table.from_pylist(rows)
        pq.write_table(table, path)
        seal(folder)
    elif name == "results.csv":
        lines = path.read_text().split("\n")
        at = chance.randrange(len(lines))
        lines[at] = chance.choice(("", lines[at] + ",1", lines[at].replace(",", ";"), '"', lines[at].replace("0", "1")))
        path.write_text("\n".join(lines))
        seal(folder)
    elif name == "bytes":
        path = chance.choice(
            [each for each in sorted(folder.rglob("*")) if each.is_file() and each.suffix != ".parquet"]
        )
        content = bytearray(path.read_bytes() or b"x")
        content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(bytes(content[: chance.choice((len(content), len(content) // 2))]))
        if path.name != "checksums.json":
            seal(folder)
    else:
        read, write = (yaml.safe_load, yaml.safe_dump) if name == "study.yaml" else (json.loads, dumped)
        path.write_text(write(mutated(read(path.read_text()), chance)))
        if name != "checksums.json":
            seal(folder)
    return str(path.relative_to(folder))


def scores_of(rows: Any) -> list[Any]:
    """What a report shows of results; a validation score besides the main one is in no second place."""
    names = ("key", "model", "task", "learning_rate", "seed", "status", "metric")
    return [
        (*(row[name] for name in names), row["scores"]["test"], row["scores"]["validation"][row["metric"]])
        for row in rows
    ]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_any_change_of_a_record_is_refused_or_changes_no_result(
    record: Path,
    tmp_path: Path,
    watch: Watch,
    part: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is taken goes through all that looks at a study: nothing is connected to, imported, or written anywhere else."""
    honest = scores_of(published(record).record.rows)
    call(["report", record, "--to", tmp_path / "out"], capfd)  # imports what it needs
    monkeypatch.chdir(tmp_path)
    taken = 0
    for number in range(20 if part else 8):
        chance = random.Random(100 * part + number)
        folder = copied(record, tmp_path / "copy")
        name = spoil(folder, chance)
        with watched(watch, tmp_path):
            code, error = call(["advise", folder], capfd)
            assert code in (0, 2), (name, error)
            if code == 0:
                taken += 1
                assert scores_of(published(folder).record.rows) == honest, name
                for words in (
                    ["report", folder, "--to", tmp_path / "out", "--predictions", tmp_path / "out"],
                    ["compare", "one", "two", "--study", folder],
                    ["claims", folder],
                    ["bundle", folder, record, "--to", tmp_path / "joined" / str(number)],
                    ["bundle", "verify", folder, "--dry-run", "--store", tmp_path / "store"],
                ):
                    code, error = call(words, capfd)
                    assert code in (0, 2), (name, words[0], error)
    assert taken < 20
    assert {path.name for path in tmp_path.iterdir()} <= {"copy", "out", "joined"}


def test_addresses_and_commands_of_a_stranger_are_not_shown(record: Path, tmp_path: Path) -> None:
    folder = copied(record, tmp_path)
    in_about(
        lambda about: about["facts"].update(command="elsewhere | sh", pages={"Dashboard": "http://elsewhere.example/x"})
    )(folder)
    facts = published(folder).record.facts
    assert (facts.command, facts.pages, facts.recorded) == ("mlmclm sweep study.yaml", {}, None)


def test_scores_without_examples_beside_others_are_said(
    record: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copied(record, tmp_path)
    file = folder / "examples" / "sst2.parquet"
    table = pq.read_table(file)
    pq.write_table(table.filter(pc.not_equal(table["key"], table["key"][0])), file)
    seal(folder)
    published(folder)
    assert "scored cells have no test examples in the bundle" in capfd.readouterr().err


def test_examples_of_one_group_are_one_example_and_say_nothing_of_other_test_sets(
    record: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copied(record, tmp_path / "copy")
    edit_examples(folder, lambda table: table.append_column("group", pa.array([0] * table.num_rows)))
    for words in (
        ["advise", folder],
        ["compare", "one", "two", "--study", folder],
        ["report", folder, "--to", tmp_path / "r"],
    ):
        code, said = call(words, capfd)
        assert code == 0, said
