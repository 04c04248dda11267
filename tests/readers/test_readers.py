"""Readers of other tools' files: what they read, and what they say of malformed files."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlmclm.errors import UserError
from mlmclm.progress import say_once
from mlmclm.readers.reader import READERS, Reader, ScoredRun, reader_of
from mlmclm.registry import register
from small_scores import sample, write_lines, write_mteb, write_run, write_samples

ROWS = [
    ("a", 0, "x", 1.0),
    ("a", 0, "y", 0.0),
    ("a", 1, "x", 0.5),
    ("a", 1, "y", 0.25),
    ("b", 0, "x", 0.0),
    ("b", 0, "y", 1.0),
]


def read(path: Path, name: str | None = None) -> list[ScoredRun]:
    return reader_of(path, name).runs(path)


def plain(runs: list[ScoredRun]) -> list[tuple[str, str, str, str, dict[str, float]]]:
    return [(run.run, run.task, run.metric, run.seed, dict(zip(run.examples, run.scores, strict=True))) for run in runs]


@pytest.mark.parametrize("name", ["s.csv", "s.tsv", "s.jsonl", "s.json", "s.parquet", "s.csv.gz", "s.jsonl.bz2"])
def test_a_table_is_read_the_same_in_every_format(tmp_path: Path, name: str) -> None:
    frame = pd.DataFrame(ROWS, columns=["run", "seed", "example", "score"]).assign(note="ignored")
    file = tmp_path / name
    if ".csv" in name or ".tsv" in name:
        frame.to_csv(file, index=False, sep="\t" if ".tsv" in name else ",")
    elif name == "s.parquet":
        frame.to_parquet(file)
    else:
        frame.to_json(file, orient="records", lines=".jsonl" in name)
    assert plain(read(file)) == [
        ("a", "", "score", "0", {"x": 1.0, "y": 0.0}),
        ("a", "", "score", "1", {"x": 0.5, "y": 0.25}),
        ("b", "", "score", "0", {"x": 0.0, "y": 1.0}),
    ]
    assert [run.run for run in reader_of(file).runs(file, {"b"})] == ["b"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("s.csv", "run,example,scores\na,1,0.5\n", r"s\.csv, row 1: no 'score'\. Did you mean 'scores'\? There is: run, example, scores"),
        ("s.csv", "run,example,score\na,1,0.5\na,2,high\n", r"s\.csv, row 2: score is 'high'; expected a finite number"),
        ("s.csv", "run,example,score\na,1,\n", r"s\.csv, row 1: score is empty; expected a finite number"),
        ("s.csv", "run,example,score\na,1,nan\n", r"s\.csv, row 1: score is 'nan'"),
        ("s.csv", "run,example,score\na,1\n", r"s\.csv cannot be read.*line 2 has 2 fields and the first 3"),
        ("s.csv", "run,run,example,score\na,a,1,1\n", r"s\.csv, line 1: column 'run' is there twice"),
        ("s.csv", 'run,example,score\na,"1,0\n', r"s\.csv cannot be read.*a quoted field has no end"),
        ("s.csv", "run,example,score\na,1,1\na,1,0\n", r"row 2: example '1' of run 'a' is there twice\. Runs with several seeds need a column seed"),
        ("s.csv", "run,seed,example,score\na,0,1,1\na,0,1,0\n", r"row 2: example '1' of run 'a' is there twice\.$"),
        ("s.csv", "run,example,score\n", r"s\.csv: no rows; expected the columns run, example, score"),
        ("s.jsonl", '{"run": "a", "example": 1, "score": 1}\n\n{"run": "a", "exam', r"s\.jsonl, line 3: not JSON \(.*cut short"),
        ("s.jsonl", '{"run": "a", "example": 1, "score": Infinity}\n', r"s\.jsonl, line 1: score is inf"),
        ("s.jsonl", '{"run": null, "example": 1, "score": 1}\n', r"s\.jsonl, line 1: run is empty; expected a name"),
        ("s.jsonl", '{"run": "a", "example": 1, "score": 1e300}\n', r"s\.jsonl, line 1: score is 1e\+300; expected a finite number"),
        ("s.jsonl", "[1]\n", r"s\.jsonl, line 1: \[1\] where an object"),
        ("s.json", "{}", r"s\.json, line 1: no 'run'. There is: nothing"),
        ("s.json", "[1]", r"s\.json, entry 1: 1 where an object"),
        ("s.json", '[{"run": "a"', r"s\.json: not JSON \(.*cut short"),
        ("s.jsonl", f'{{"run": "a", "example": {"1" * 5000}, "score": 1}}\n', r"s\.jsonl, line 1: not JSON that can be read \(Exceeds the limit"),
        ("s.jsonl", '{"run": "a", "example": 1, "score": 0, "score": 1}\n', r"s\.jsonl, line 1: not JSON .*the key 'score' is there twice"),
        ("s.jsonl", f'{{"run": "a", "example": "x", "score": {"1" * 400}}}\n', r"s\.jsonl, line 1: score is 1{59}"),
        ("s.csv", "run,example,score\na,1,1_000\n", r"s\.csv, row 1: score is '1_000'; expected a finite number"),
        ("s.csv", "run,example,score\na,1,1\n\na,2,\xff\n", r"s\.csv, line 4: not UTF-8 text"),
        ("s.csv", "\xff\xfer\0u\0n\0", r"s\.csv, line 1: not UTF-8 text \(invalid start byte, 0xff\)\. Save the file as UTF-8"),
        ("s.csv", "run,example,score\na,\xff,1\n", r"s\.csv, line 2: not UTF-8"),
        ("s.parquet", "PAR1", r"s\.parquet cannot be read"),
    ],
)  # fmt: skip
def test_a_malformed_table_says_where_and_what(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=said):
        read(tmp_path / name)


def test_numbers_and_truth_are_read_as_other_tools_write_them(tmp_path: Path) -> None:
    rows = ["True", "false", "0.25", "1e-1"]
    (tmp_path / "s.csv").write_text("run,example,score\n" + "".join(f"a,{at},{text}\n" for at, text in enumerate(rows)))
    frame = pd.DataFrame(
        {
            "run": "a",
            "example": range(4),
            "score": list(map(Decimal, ("1", "0", "0.25", "0.1"))),
            "ignored": [[{"a": 1}]] * 4,
        }
    )
    frame.to_parquet(tmp_path / "s.parquet")
    lines = "".join(f'{{"run": "a", "example": {at}, "score": {text.lower()}}}\n' for at, text in enumerate(rows))
    (tmp_path / "s.json").write_text(lines)  # one object per line, under the name of an array
    for name in ("s.csv", "s.parquet", "s.json"):
        assert plain(read(tmp_path / name)) == [("a", "", "score", "", {"0": 1.0, "1": 0.0, "2": 0.25, "3": 0.1})]


def test_scores_in_csv_and_tsv_are_read_as_data_files_are(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("sep=;\nrun;example;score\na;1;1\n")  # as Excel is told
    (tmp_path / "s.tsv").write_text('run\texample\tscore\na\t"5 inches" tall\t1\na\t5" tall\t0\n')  # as GLUE writes
    assert plain(read(tmp_path / "s.csv")) == [("a", "", "score", "", {"1": 1.0})]
    assert plain(read(tmp_path / "s.tsv")) == [("a", "", "score", "", {'"5 inches" tall': 1.0, '5" tall': 0.0})]


def test_an_ignored_column_may_hold_any_text(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text(f'run,example,text,score\na,1,"{"x" * 200_000}\n",1\n')
    assert plain(read(tmp_path / "s.csv")) == [("a", "", "score", "", {"1": 1.0})]


def test_a_table_of_parquet_names_a_missing_column(tmp_path: Path) -> None:
    file = tmp_path / "s.parquet"
    table = pa.table({"run": ["a"], "example": ["x"], "scores": [1.0]})
    pq.write_table(table, file)
    with pytest.raises(UserError, match=r"s\.parquet, row 1: no 'score'\. Did you mean 'scores'\?"):
        read(file)


def test_samples_of_a_model_are_read_by_task_and_metric_and_the_newest_file_counts(tmp_path: Path) -> None:
    model = tmp_path / "org__model"
    write_samples(model, "arc_easy", [0, 0], "2025-01-02T03-04-05.678")
    write_samples(model, "arc_easy", [1, 0])
    write_samples(model, "boolq", [1, 1, 0])
    runs = read(tmp_path)
    assert plain(runs) == [
        ("org__model", "arc_easy", "acc", "", {"0": 1.0, "1": 0.0}),
        ("org__model", "arc_easy", "acc_norm", "", {"0": 0.0, "1": 1.0}),
        ("org__model", "boolq", "acc", "", {"0": 1.0, "1": 1.0, "2": 0.0}),
        ("org__model", "boolq", "acc_norm", "", {"0": 0.0, "1": 0.0, "2": 1.0}),
    ]
    assert runs[0].contents == ["hash of 0", "hash of 1"]
    for file in model.glob("*.jsonl"):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert plain(read(tmp_path)) == plain(runs)
    assert plain(read(model / "samples_boolq_2026-01-02T03-04-05.678.jsonl.gz")) == plain(runs)[2:]


def test_samples_with_filters_and_of_older_versions_are_read(tmp_path: Path) -> None:
    lines = [
        sample(at, 1, metrics=["exact_match"], exact_match=value, filter=name)
        for at in range(2)
        for name, value in (("strict-match", 0.0), ("flexible-extract", 1.0))
    ]
    file = write_lines(tmp_path / "samples_gsm8k_2026-01-02T03-04-05.678.jsonl", lines)
    assert {run.metric for run in read(file)} == {"exact_match,strict-match", "exact_match,flexible-extract"}
    old = {"doc_id": 0, "doc": {}, "target": "x", "arguments": [], "resps": [], "filtered_resps": [], "acc": True}
    file = write_lines(tmp_path / "old.jsonl", [old, {**old, "doc_id": 1, "acc": False}])
    assert plain(read(file)) == [(tmp_path.name, "old", "acc", "", {"0": 1.0, "1": 0.0})]


def old_sample(document: int, **metrics: float) -> dict[str, object]:
    """A sample of lm-evaluation-harness 0.4.0 to 0.4.2 (`evaluator.py`)."""
    plain = {"doc_id": document, "doc": {"q": "?"}, "target": 0, "arguments": [["q", " a"]], "resps": [[[-1.0, False]]]}
    return {**plain, "filtered_resps": [[-1.0, False]], **metrics}


def test_samples_of_0_4_1_are_one_list_named_by_the_model_s_arguments_and_the_task(tmp_path: Path) -> None:
    arguments = ("pretrained=org__m,dtype=float", "pretrained=org__m,revision=step_1")
    tasks = {"arc_easy": [1.0, 0.0], "easy": [0.0, 0.0], "boolq": [1.0, 1.0]}
    for number, model in enumerate(arguments):
        for task, values in tasks.items():
            rows = [old_sample(at, acc=value * (1 - number / 2)) for at, value in enumerate(values)]
            (tmp_path / f"{model}_{task}.jsonl").write_text(json.dumps(rows, indent=2))
    results = {
        "results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": task} for task in tasks},
        "configs": {},
    }
    with pytest.raises(
        UserError, match=r"_arc_easy\.jsonl: samples of lm-evaluation-harness before 0\.4\.3.*results\.json"
    ):
        read(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(results, indent=2))
    found = {(run.run, run.task): run.scores.tolist() for run in read(tmp_path)}
    assert found == {
        (model, task): [value * (1 - number / 2) for value in values]
        for number, model in enumerate(arguments)
        for task, values in tasks.items()
    }
    (tmp_path / "other").mkdir()
    renamed = tmp_path / "other" / "samples_arc_easy.jsonl"
    (tmp_path / f"{arguments[0]}_arc_easy.jsonl").rename(renamed)
    assert plain(read(renamed)) == [("other", "arc_easy", "acc", "", {"0": 1.0, "1": 0.0})]


@pytest.mark.parametrize("listed", [True, False])
def test_two_filters_without_a_key_are_two_scores(tmp_path: Path, listed: bool) -> None:
    """Before 0.4.5 a filter's samples follow another's, in the order of the results beside them."""
    rows = [old_sample(at, exact_match=value) for value in (0.0, 1.0) for at in range(3)]
    file = tmp_path / "samples_gsm8k_2024-05-06T07-08-09.123.jsonl"
    write_lines(file, rows)
    if listed:
        scores = {
            f"exact_match{part},{name}": 0.5
            for name in ("strict-match", "flexible-extract")
            for part in ("", "_stderr")
        }
        results = {"results": {"gsm8k": {"alias": "gsm8k", **scores}}}
        (tmp_path / "results_2024-05-06T07-08-09.123.json").write_text(json.dumps(results))
    names = ("strict-match", "flexible-extract") if listed else ("filter 1", "filter 2")
    found = {run.metric: run.scores.tolist() for run in read(file)}
    assert found == {f"exact_match,{names[0]}": [0.0] * 3, f"exact_match,{names[1]}": [1.0] * 3}
    write_lines(file, rows[:-1])
    with pytest.raises(UserError, match="line 4: doc_id 0 is there twice with exact_match"):
        read(file)


def test_lines_of_one_document_with_other_prompts_are_examples_of_one_group(tmp_path: Path) -> None:
    rows = [sample(at, acc, prompt_hash=prompt) for at, acc in ((0, 1.0), (1, 0.0)) for prompt in "abc"]
    write_lines(tmp_path / "samples_t.jsonl", rows)
    acc = next(run for run in read(tmp_path) if run.metric == "acc")
    assert list(acc.examples) == ["0", "0 prompt 2", "0 prompt 3", "1", "1 prompt 2", "1 prompt 3"]
    assert (list(acc.groups), acc.scores.tolist()) == (["0"] * 3 + ["1"] * 3, [1.0] * 3 + [0.0] * 3)
    write_lines(tmp_path / "samples_t.jsonl", rows[::3])
    assert all(run.groups == () for run in read(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"doc_id": 0}, "line 2: doc_id 0 is there twice with acc"),
        ({"metrics": ["f2"]}, "line 2: no 'f2'"),
        ({"metrics": "acc"}, "line 2: metrics is 'acc'; expected a list"),
        ({"doc_id": None}, "line 2: doc_id is empty"),
    ],
)
def test_malformed_samples_say_where_and_what(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = write_lines(tmp_path / "samples_t_2026-01-02T03-04-05.678.jsonl", [sample(0, 1), {**sample(1, 0), **change}])
    with pytest.raises(UserError, match=f"samples_t_.*{said}"):
        read(file)


def test_samples_without_a_number_say_so_where_their_metric_is_asked_for(tmp_path: Path) -> None:
    number, share = "a finite number", "a number from 0 to 1"
    for value, said, expected in (
        (None, "empty", number),
        ("right", "'right'", number),
        (math.nan, "nan", number),
        (1e300, "1e+300", "a finite number of at most 1e+30"),
        ("1e20", "'1e20'", share),
        (-1, "-1", share),
    ):
        write_lines(tmp_path / "samples_t.jsonl", [sample(0, 1), {**sample(1, 0), "acc": value}])
        acc, other = read(tmp_path)
        assert acc.fault == f"{tmp_path / 'samples_t.jsonl'}, line 2: acc is {said}; expected {expected}."
        assert other.fault == "" and other.metric == "acc_norm"
    write_lines(tmp_path / "samples_t.jsonl", [sample(0, 1, metrics=["f1"], f1=[1, 0])])
    assert "no metric with a number per document" in read(tmp_path)[0].fault


def test_a_model_s_name_is_that_of_the_folder_in_which_a_link_to_its_samples_lies(tmp_path: Path) -> None:
    for model, values in (("a", [1, 0]), ("b", [0, 0])):
        blob = write_samples(tmp_path / "blobs", "arc", values).rename(tmp_path / "blobs" / model)
        place = tmp_path / "snapshots" / "c0ffee" / model / "samples_arc_2026-01-02T03-04-05.678.jsonl"
        place.parent.mkdir(parents=True)
        place.symlink_to(blob)
    assert [run.run for run in read(tmp_path / "snapshots" / "c0ffee") if run.metric == "acc"] == ["a", "b"]


def test_folders_of_one_name_are_runs_of_their_own_if_they_have_the_same_task(tmp_path: Path) -> None:
    write_samples(tmp_path / "old" / "org__m", "arc", [0, 0], "2025-01-02T03-04-05.678")
    write_samples(tmp_path / "new" / "org__m", "boolq", [1, 0])
    assert {(run.run, run.task) for run in read(tmp_path)} == {("org__m", "arc"), ("org__m", "boolq")}
    write_samples(tmp_path / "new" / "org__m", "arc", [1, 0])
    runs = [run for run in read(tmp_path) if run.metric == "acc"]
    assert {(run.run, run.task) for run in runs} == {
        ("old/org__m", "arc"), ("new/org__m", "arc"), ("new/org__m", "boolq"),
    }  # fmt: skip
    assert {run.run for run in reader_of(tmp_path).runs(tmp_path, {"new/org__m"})} == {"new/org__m"}


def test_mteb_s_scores_are_means_over_all_subsets_as_mteb_s_own_and_tell_revisions_apart(tmp_path: Path) -> None:
    folder = write_mteb(tmp_path / "results" / "org__m" / "main", {"SciFact": 0.5, "NFCorpus": 0.25}, model="org/m")
    several = json.loads((folder / "SciFact.json").read_text())
    several["scores"]["dev"] = [
        {"hf_subset": name, "main_score": score, "ndcg_at_10": 0.0, "note": [1]}
        for name, score in (("en", 0.1), ("de", 0.3))
    ]
    (folder / "SciFact.json").write_text(json.dumps(several))
    main, other = read(tmp_path / "results")
    assert (main.run, main.metric, main.examples) == ("org/m", "main_score", ["NFCorpus", "SciFact"])
    assert main.scores.tolist() == pytest.approx([0.25, (0.5 + 0.1 + 0.3) / 3])
    assert other.metric == "ndcg_at_10"
    assert main.contents[0] != main.contents[1]
    write_mteb(tmp_path / "results" / "org__m" / "v2", {"SciFact": 0.5}, model="org/m")
    assert {run.run for run in read(tmp_path / "results")} == {"org/m@main", "org/m@v2"}


@pytest.mark.parametrize("missing", ["null", "NaN", '"none"', None])
def test_a_task_of_mteb_without_a_score_is_left_out_and_named(
    tmp_path: Path, missing: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """mteb writes NaN for a correlation of constant predictions."""
    write_mteb(tmp_path, {"A": 0.5, "B": 0.125})
    file = tmp_path / "B.json"
    text = file.read_text()
    file.write_text(text.replace('"main_score": 0.125, ', "") if missing is None else text.replace("0.125", missing))
    assert file.read_text() != text
    say_once.cache_clear()
    main, *_ = read(tmp_path, "mteb")
    assert (main.examples, main.scores.tolist()) == (["A"], [0.5])
    assert f"{file}: the main score of task B is missing or no finite number" in " ".join(
        capsys.readouterr().err.split()
    )


OLD_MTEB: dict[str, dict[str, object]] = {
    "STSBenchmark": {"cos_sim": {"pearson": 0.7, "spearman": 0.8}, "euclidean": {"pearson": 0.6, "spearman": 0.5}},
    "NFCorpus": {"ndcg_at_1": 0.2, "ndcg_at_10": 0.3, "map_at_10": 0.1},
    "TwentyNewsgroupsClustering": {"v_measure": 0.4, "v_measure_std": 0.01},
    "SciDocsRR": {"map": 0.6, "mrr": 0.7},
    "SprintDuplicateQuestions": {"cos_sim": {"ap": 0.5, "f1": 0.6}, "dot": {"ap": 0.4, "f1": 0.5}, "max": {"ap": 0.55, "f1": 0.6}},
    "Cmnli": {"cos_sim": {"accuracy": 0.65, "ap": 0.72}, "max": {"accuracy": 0.66, "ap": 0.73, "f1": 0.7}},
    "BUCC": {"de-en": {"accuracy": 0.9, "f1": 0.89, "precision": 0.88, "recall": 0.9}},
    "Banking77Classification": {"accuracy": 0.8, "f1": 0.7, "main_score": 0.8},
    "AmazonCounterfactualClassification": {
        "de": {"accuracy": 0.6, "f1": 0.5, "main_score": 0.6}, "en": {"accuracy": 0.7, "f1": 0.6, "main_score": 0.7},
    },
}  # fmt: skip
"""Scores as mteb 1.1.1 wrote them, by the `evaluate` of each kind of task."""


@pytest.mark.filterwarnings("ignore:Main score")
def test_results_of_mteb_before_1_11_have_the_scores_that_mteb_reads_in_them(tmp_path: Path) -> None:
    task_result = pytest.importorskip("mteb.results.task_result")
    expected = {}
    for task, scores in OLD_MTEB.items():
        split = "validation" if task == "Cmnli" else "test"
        old = {"mteb_version": "1.1.1", "dataset_revision": None, "mteb_dataset_name": task}
        content = {**old, split: {**scores, "evaluation_time": 1.0}}
        (tmp_path / f"{task}.json").write_text(json.dumps(content, indent=2, sort_keys=True))
        found = task_result.TaskResult.from_disk(tmp_path / f"{task}.json")
        scores = [each["main_score"] for own in found.scores.values() for each in own]
        # mteb knows no main score of old reranking results, whose `map` is what it calls `map_at_1000` since.
        expected[task] = 0.6 if task == "SciDocsRR" else float(np.mean(scores))
    (main,) = (run for run in read(tmp_path) if run.metric == "main_score")
    assert dict(zip(main.examples, main.scores, strict=True)) == pytest.approx(expected)
    write_mteb(tmp_path, {"SciFact": 0.5})
    both = json.loads((tmp_path / "SciFact.json").read_text()) | {"mteb_dataset_name": "SciFact"}  # of mteb 1.38
    (tmp_path / "SciFact.json").write_text(json.dumps(both))
    (tmp_path / "Odd.json").write_text(json.dumps({"mteb_dataset_name": "Odd", "test": {"own": 1.0}}))
    main = next(run for run in read(tmp_path) if run.metric == "main_score")
    assert "SciFact" in main.examples and "Odd" not in main.examples


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["scores"]["test"].append(found["scores"]["test"][0]), r"scores\.test\[1\]: a second entry of the subset 'default'"),
        (lambda found: found["scores"].update(test={}), r"B\.json: scores\.test is no list of subsets"),
        (lambda found: found.update(scores={}), r"B\.json: scores has no split"),
        (lambda found: found.update(task_name="A"), r"B\.json: a second result of task 'A'"),
        (lambda found: found.pop("task_name"), r"B\.json: no 'task_name'"),
    ],
)  # fmt: skip
def test_malformed_results_of_mteb_say_where_and_what(
    tmp_path: Path, change: Callable[[dict[str, object]], object], said: str
) -> None:
    write_mteb(tmp_path, {"A": 0.5, "B": 0.5})
    found = json.loads((tmp_path / "B.json").read_text())
    change(found)
    (tmp_path / "B.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match=said):
        read(tmp_path, "mteb")


def test_encodeval_s_tree_is_read_with_rates_seeds_and_validation(tmp_path: Path) -> None:
    write_run(tmp_path, "m", "sst2", "lr1e-04_sd0", 0.75, [1, 0, 1, 1])
    write_run(tmp_path, "m", "nq", "msmarco_pairs_lr5e-05_sd3", 0.5, [0.25, 0.75], "IR")
    first, second = read(tmp_path / "results")
    assert (first.run, first.task, first.metric, first.seed) == ("m", "nq", "ndcg_at_10", "3")
    assert (first.learning_rate, first.validation) == (5e-5, 0.5)
    assert (second.task, second.metric, second.examples) == ("sst2", "accuracy", ["0", "1", "2", "3"])
    assert read(tmp_path / "results" / "m" / "SC" / "sst2" / "lr1e-04_sd0")[0].place == second.place
    results = reader_of(tmp_path).results(tmp_path)
    assert [each["key"] for each in results] == ["m/IR/nq/msmarco_pairs_lr5e-05_sd3", "m/SC/sst2/lr1e-04_sd0"]
    assert results[1]["scores"] == {"validation": {"accuracy": 0.75}, "test": {"accuracy": 0.75}}
    assert (results[0]["family"], results[0]["learning_rate"], results[0]["seed"]) == ("retrieval", 5e-5, 3)
    scores = reader_of(tmp_path).test_scores(results[1])
    assert scores is not None and scores.tolist() == [1, 0, 1, 1]


def test_one_data_set_in_two_families_is_two_tasks(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text(f"{HEADER}m,SC,x,1e-4,0,0.9,0.8\nm,TC,x,1e-4,0,0.9,0.8\nm,TC,y,1e-4,0,0.9,0.8\n")
    for family in ("SC", "TC"):
        write_run(tmp_path, "m", "x", "lr1e-04_sd0", 0.5, [0, 1], family)
    write_run(tmp_path, "m", "y", "lr1e-04_sd0", 0.5, [0, 1], "TC")
    for path in (tmp_path / "s.csv", tmp_path / "results"):
        assert [each["task"] for each in reader_of(path).results(path)] == ["SC-x", "TC-x", "y"]


def test_a_result_of_encodeval_is_named_by_the_folders_of_a_link_to_it(tmp_path: Path) -> None:
    file = write_run(tmp_path, "m", "sst2", "lr1e-04_sd0", 0.75, [1, 0, 1, 1])
    blob = file.rename(tmp_path / "results" / "blob")
    file.symlink_to(blob)
    for path in (tmp_path / "results", file):
        (run,) = read(path)
        assert (run.run, run.task, run.seed, run.learning_rate) == ("m", "sst2", "0", 1e-4)


@pytest.mark.parametrize("name", ["encodeval", "lm-eval", "mteb"])
def test_a_folder_of_results_is_read_only_where_its_files_lie_inside(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "received"
    if name == "encodeval":
        file = write_run(folder, "m", "sst2", "lr1e-04_sd0", 0.75, [1, 0, 1, 1])
    elif name == "lm-eval":
        file = write_samples(folder / "m", "arc", [1, 0])
    else:
        file = folder / "t.json"
        folder.mkdir()
        file.write_text(json.dumps({"task_name": "t", "scores": {"test": [{"hf_subset": "en", "main_score": 0.5}]}}))
    assert read(folder, name)
    mine = file.rename(tmp_path / "mine")
    file.symlink_to(mine)
    with pytest.raises(UserError, match="a link that leads out of the folder"):
        read(folder, name)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="not a regular file"):
        read(folder, name)
    mine.rename(file.with_name(f"{file.stem}\x1b[2J{file.suffix}") if name == "mteb" else file)
    if name == "mteb":
        file.unlink()
        with pytest.raises(UserError, match="cannot be printed"):
            read(folder, name)


def test_two_results_of_encodeval_of_one_rate_and_seed_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "m", "sst2", "lr1e-04_sd0", 0.75, [1, 0])
    write_run(tmp_path, "m", "sst2", "lr1e-4_sd0", 0.75, [1, 0])
    with pytest.raises(UserError, match=r"lr1e-4_sd0.*: a second run of m on sst2 .* after .*lr1e-04_sd0"):
        reader_of(tmp_path).results(tmp_path)


def test_one_data_set_after_two_trainings_is_two_tasks(tmp_path: Path) -> None:
    for run in ("msmarco_lr1e-04_sd0", "nli_lr1e-04_sd0"):
        write_run(tmp_path, "m", "nq", run, 0.5, [0.25, 0.75], "IR")
    assert [run.task for run in read(tmp_path)] == ["nq-msmarco", "nq-nli"]


HEADER = "model,family,dataset,learning_rate,seed,validation_score,test_score\n"


def test_encodeval_s_scores_in_a_table_are_results(tmp_path: Path) -> None:
    file = tmp_path / "scores.csv"
    file.write_text(f"{HEADER}m,SC,sst2,1e-04,0,0.9,0.8\nm,SC,sst2,1e-04,1,0.7,unread\nm,SC,sst2,5e-04,0,,\n")
    assert reader_of(file).name == "encodeval"
    found = reader_of(file).results(file)
    assert [(each["status"], each["scores"]) for each in found] == [
        ("ok", {"validation": {"accuracy": 0.9}, "test": {"accuracy": 0.8}}),
        ("ok", {"validation": {"accuracy": 0.7}}),
        ("diverged", None),
    ]
    assert [each["key"] for each in found][2] == "m/SC/sst2/lr5e-4_sd0"
    with pytest.raises(UserError, match="none of single examples"):
        read(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HEADER}m,SC,sst2,fast,0,0.9,0.8\n", "row 1: learning_rate is 'fast'"),
        (f"{HEADER}m,SC,sst2,-1,0,0.9,0.8\n", "row 1: learning_rate is '-1'; expected a number above 0"),
        (f"{HEADER}m,SC,sst2,1e-320,0,0.9,0.8\n", "row 1: learning_rate is '1e-320'; expected a number above 0"),
        (f"{HEADER}m,SC,sst2,1,0.5,0.9,0.8\n", "row 1: seed is 0.5; expected a whole number"),
        (f"{HEADER}m,SC,sst2,1,1e22,0.9,0.8\n", r"row 1: seed is 1e\+22; expected a whole number from 0 to 2\^63 - 1"),
        (f"{HEADER}m,SC,sst2,1,0,0.9,80.5\n", "row 1: test_score is 80.5; expected a number from 0 to 1. Are these percentages"),
        (f"{HEADER}m,SR,sts,1,0,-1.5,0.8\n", "row 1: validation_score is -1.5; expected a number from -1 to 1"),
        (f"{HEADER}m,SC,sst2,1,0,0.9,?\n", r"row 1: test_score is '\?'"),
        (f"{HEADER}m,SC,sst2,1e-4,0,0.9,0.8\nm,SC,sst2,0.0001,0,0.9,0.8\n", "row 2: a second row of the run m/SC/sst2/lr1e-4_sd0"),
        (f"{HEADER}", "no rows"),
        (HEADER.replace("family", "kind") + "m,SC,sst2,1e-4,0,1,1\n", "row 1: no 'family'"),
    ],
)  # fmt: skip
def test_a_malformed_table_of_encodeval_says_where_and_what(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        reader_of(tmp_path / "s.csv", "encodeval").results(tmp_path / "s.csv")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"test": {"score": 0.5', r"results\.json.*not JSON"),
        ('{"test": [1]}', r"results\.json: test: \[1\] where an object"),
        ('{"validation": {"score": 1.0}}', r"results\.json: no 'test', so there is no score of any example"),
        ('{"test": {"score": 0.5}}', r"results\.json: test: no 'scores_i'"),
        ('{"test": {"score": 0.5, "scores_i": [1, "a"]}}', r"test\.scores_i\[1\] is 'a'"),
        ('{"test": {"score": 0.5, "scores_i": []}}', r"test\.scores_i is no list of numbers"),
        ('{"test": {"score": 0.6, "scores_i": [1, 0]}}', r"score is 0\.6, and the mean of scores_i 0\.5"),
    ],
)
def test_a_malformed_result_of_encodeval_says_where_and_what(tmp_path: Path, content: str, said: str) -> None:
    write_run(tmp_path, "m", "sst2", "lr1e-04_sd0", 0.75, [1, 0]).write_text(content)
    with pytest.raises(UserError, match=said):
        read(tmp_path, "encodeval")


def test_an_import_says_which_scores_are_not_those_of_their_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "m", "sst2", "lr1e-04_sd0", 0.75, [1, 0])
    file = write_run(tmp_path, "m", "sst2", "lr1e-04_sd1", 0.75, [1, 0])
    reader_of(tmp_path, "encodeval").results(tmp_path)
    assert "scores are not those" not in capsys.readouterr().err
    content = json.loads(file.read_text())
    for wrong, said in ((0.6, "score is 0.6, and the mean of scores_i 0.5"), ([1, "a"], r"scores_i[1] is 'a'")):
        test = content["test"] | ({"score": wrong} if isinstance(wrong, float) else {"scores_i": wrong})
        file.write_text(json.dumps({**content, "test": test}))
        found = reader_of(tmp_path, "encodeval").results(tmp_path)
        assert [each["scores"]["test"]["accuracy"] for each in found] == [0.5, test["score"]]
        shown = capsys.readouterr().err
        assert "1 of the scores are not those of their examples" in shown and f"{file}: test" in shown and said in shown


def test_results_to_import_name_a_rate_and_a_seed_and_have_a_score(tmp_path: Path) -> None:
    file = write_run(tmp_path, "m", "sst2", "lr1e-04_sd0", None, None)
    with pytest.raises(UserError, match="neither 'validation' nor 'test'"):
        reader_of(tmp_path, "encodeval").results(tmp_path)
    file = file.parent.rename(file.parent.with_name("lr1e-04_sd99999999999999999999")) / file.name
    file.write_text('{"test": {"score": 0.5}}')
    with pytest.raises(UserError, match=r"results\.json: the seed in its folder's name is 1e\+20; expected"):
        reader_of(tmp_path, "encodeval").results(tmp_path)
    file = file.parent.rename(file.parent.with_name("lr1e-04_sd0")) / file.name
    file.write_text('{"test": {"score": 50}}')
    with pytest.raises(UserError, match=r"results\.json: test\.score is 50; expected a number from 0 to 1"):
        reader_of(tmp_path, "encodeval").results(tmp_path)
    for name in ("hyperparam1", "lr0_sd0", "lr1e-320_sd0", "lr1e999_sd0"):
        file = file.parent.rename(file.parent.with_name(name)) / file.name
        with pytest.raises(UserError, match=f"'{name}' does not name a learning rate and a seed, as lr1e-04_sd0 does"):
            reader_of(tmp_path, "encodeval").results(tmp_path)


def test_a_file_that_cannot_be_parsed_is_not_recognised(tmp_path: Path) -> None:
    for content in ("[" * 100_000, '{"task_name": ' + "1" * 5000 + "}"):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(UserError, match="no reader recognises it"):
            reader_of(tmp_path)


def test_what_no_reader_recognises_lists_the_formats(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(
        UserError, match=r"no reader recognises it\. Formats: .*table \(tables.*lm-eval|lm-eval .*table \(tables"
    ):
        reader_of(tmp_path / "x.txt")
    with pytest.raises(UserError, match="there is no such file or folder"):
        reader_of(tmp_path / "y.csv")
    with pytest.raises(UserError, match=r"x{300}\.\.\. \(5,\d+ characters\): there is no such file"):
        reader_of(Path("x" * 5000))
    with pytest.raises(UserError, match=r"unknown reader 'mtebb'\. Did you mean 'mteb'\?"):
        reader_of(tmp_path, "mtebb")
    for name in ("lm-eval", "mteb", "encodeval"):
        with pytest.raises(UserError, match=r"no .* in it"):
            reader_of(tmp_path, name).runs(tmp_path)
    with pytest.raises(UserError, match="have no grid of learning rates and seeds to import"):
        reader_of(tmp_path, "mteb").results(tmp_path)


@pytest.mark.usefixtures("registers")
def test_a_registered_reader_is_asked_before_tables_are_read(tmp_path: Path) -> None:
    class Numbers(Reader):
        name = "numbers"
        title = "numbers, one a line"

        def recognises(self, path: Path) -> bool:
            return path.suffix == ".csv" and path.read_text()[:1].isdigit()

        def runs(self, path: Path, only: object = None) -> list[ScoredRun]:
            values = [float(line) for line in path.read_text().split()]
            return [ScoredRun(path.stem, "", "score", [str(at) for at in range(len(values))], np.asarray(values))]

    register("reader", None, Numbers)
    (tmp_path / "mine.csv").write_text("1\n0\n")
    assert reader_of(tmp_path / "mine.csv").name == "numbers"
    assert {"table", "lm-eval", "mteb", "encodeval"} <= set(READERS)
