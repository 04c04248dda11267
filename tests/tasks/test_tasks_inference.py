"""A data file is read as the task that its columns and their values speak for, or refused with what to do."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tasks_columns import load

from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.documents import open_source
from mlmclm.errors import UserError
from mlmclm.tasks.columns import TaskData
from mlmclm.tasks.data_file import FileTask, held_out_rows, read_task, row_groups
from mlmclm.tasks.declared_tasks import find_tasks
from mlmclm.tasks.inference import Overrides
from mlmclm.tasks.load import load_task

WORDS = ["the", "film", "was", "lovely", "and", "so", "very", "long", "today", "again"]


def text(number: int) -> str:
    return f"{' '.join(WORDS[number % 7 :])} {number}"


def rows(count: int = 60, **more: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows with a text, and a value of each further column in turn."""
    return [
        {"text": text(number)} | {name: values[number % len(values)] for name, values in more.items()}
        for number in range(count)
    ]


def write(path: Path, table: list[dict[str, Any]], mark: str = "") -> Path:
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(mark)
            made = csv.DictWriter(file, list(table[0]), delimiter="," if path.suffix == ".csv" else "\t")
            made.writeheader()
            made.writerows(table)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in table), encoding="utf-8")
    return path


def read(path: Path, family: str | None = None, text: tuple[str, ...] = (), label: str | None = None) -> FileTask:
    return read_task(path, Overrides(family, text, label))


def written(task: FileTask, folder: Path) -> TaskData:
    """Load a task from the files that are written for it."""
    target = Path(mkdtemp(dir=folder))
    task.write(target)
    declared = find_tasks([target / "tasks"])[task.name]
    return load_task(declared, store=folder / "store", data_root=target / "data")


@pytest.mark.parametrize(
    ("columns", "family", "found"),
    [
        ({"label": ["good", "bad"]}, "sequence-classification", {"text": "text", "label": "label"}),
        ({"Sentiment": [0, 1, 1]}, "sequence-classification", {"text": "text", "label": "Sentiment"}),
        ({"colour": ["red", "blue"]}, "sequence-classification", {"text": "text", "label": "colour"}),
        ({"label": [True, False]}, "sequence-classification", {"text": "text", "label": "label"}),
        ({"stars": ["1", "2", "5"]}, "sequence-classification", {"text": "text", "label": "stars"}),
        ({"score": [0.5, 1.25, 2.0, 3.75]}, "sequence-regression", {"text": "text", "label": "score"}),
        ({"score": ["0.5", "1.25", "2.0"]}, "sequence-regression", {"text": "text", "label": "score"}),
        ({"score": list(range(0, 120, 2))}, "sequence-regression", {"text": "text", "label": "score"}),
        (
            {"text_pair": [text(90), text(91), text(92)], "label": ["yes", "no"]},
            "sequence-classification",
            {"text": "text", "text_pair": "text_pair", "label": "label"},
        ),
        (
            {"id": [str(n) for n in range(60)], "label": ["a", "b"]},
            "sequence-classification",
            {"text": "text", "label": "label"},
        ),
    ],
)
def test_text_and_label_are_found(
    columns: dict[str, list[Any]], family: str, found: dict[str, str], tmp_path: Path
) -> None:
    for suffix in (".csv", ".jsonl"):
        task = read(write(tmp_path / f"data{suffix}", rows(**columns)))
        assert (task.task.family, dict(task.reading.columns)) == (family, found)
    loaded = written(task, tmp_path)
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == tuple(
        task.tables[part].num_rows for part in ("train", "validation", "test")
    )


def test_tokens_and_tags_are_lists_or_words_with_spaces(tmp_path: Path) -> None:
    lists = [{"tokens": ["Anna", "in", f"P{n}"], "ner_tags": ["B-PER", "O", "B-LOC"]} for n in range(40)]
    spaced = [{name: " ".join(value) for name, value in row.items()} for row in lists]
    for name, table in (("lists.jsonl", lists), ("spaced.csv", spaced)):
        task = read(write(tmp_path / name, table))
        assert task.task.family == "token-classification"
        assert task.tables["train"]["tags"][0].as_py() == ["B-PER", "O", "B-LOC"]
    others = [{"text": text(n), "label": "ab"[n % 2], "authors": ["A"], "keywords": ["b", "c"]} for n in range(40)]
    assert read(write(tmp_path / "others.jsonl", others)).task.family == "sequence-classification"
    short = [*lists, {"tokens": ["Anna", "left"], "ner_tags": ["O"]}]
    with pytest.raises(UserError, match="2 words have 1 tags in 'Anna left'"):
        read(write(tmp_path / "short.jsonl", short))
    words = "\n\n".join(f"Anna B-PER\nin O\nP{n} B-LOC" for n in range(40))
    (tmp_path / "words.conll").write_text(words)
    assert read(tmp_path / "words.conll").task.family == "token-classification"


def test_query_and_positive_are_retrieval_and_a_document_is_in_one_part(tmp_path: Path) -> None:
    table = [{"query": f"which one is {n}", "positive": f"document {n // 2} of many"} for n in range(80)]
    task = read(write(tmp_path / "pairs.csv", table))
    assert task.task.family == "retrieval"
    documents = [set(own["positive"].to_pylist()) for own in task.tables.values()]
    assert not (documents[0] & documents[1] or documents[0] & documents[2] or documents[1] & documents[2])
    loaded = written(task, tmp_path)
    assert len(loaded.test.queries) == task.tables["test"].num_rows


def test_answers_are_found_in_their_context_and_rows_without_one_are_counted(tmp_path: Path) -> None:
    table = [
        {"question": f"who {n}", "context": f"It was Anna number {n}.", "answer": f"number {n}"} for n in range(60)
    ]
    table[3]["answer"] = "somebody else"
    task = read(write(tmp_path / "asked.jsonl", table))
    assert task.task.family == "question-answering"
    assert "1 whose answer is not in the context" in task.facts["left out"]
    row = task.tables["train"].to_pylist()[0]
    start = row["answers"]["answer_start"][0]
    assert row["context"][start:].startswith(row["answers"]["text"][0])
    written(task, tmp_path)


def test_a_byte_order_mark_missing_values_and_nested_objects_are_read(tmp_path: Path) -> None:
    table = rows(label=["good", "bad"])
    table[0]["label"], table[1]["text"] = "", "  "
    task = read(write(tmp_path / "marked.csv", table, mark="\ufeff"))
    assert task.facts["left out"] == "1 without label, 1 without text"
    assert sum(own.num_rows for own in task.tables.values()) == 58
    nested = [{"meta": {"id": n, "deep": {"body": text(n)}}, "y": n % 2} for n in range(60)]
    found = read(write(tmp_path / "nested.jsonl", nested), text=("meta.deep.body",))
    assert found.reading.columns == {"text": "meta.deep.body", "label": "y"}
    whole = [{"text": text(n), "label": None if n == 5 else n % 3 + 1} for n in range(60)]
    assert set(read(write(tmp_path / "whole.csv", whole)).tables["train"]["label"].to_pylist()) == {"1", "2", "3"}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"label": ["a", "b"], "category": ["c", "d"]}, "label and category could each be the label.*--label-column"),
        ({"colour": ["a", "b"], "form": ["c", "d", "d"]}, "colour and form could each be the label"),
        ({"label": ["a"]}, "all 60 rows have the label 'a'; two different ones are needed"),
        ({"label": [f"class number {n}" for n in range(60)]}, "60 different values in 60 rows, which are no classes"),
        ({"id": list(range(60))}, r"no column looks like a label. Its columns: text \(text\), id \(ids\)"),
        (
            {"review": [text(n) for n in range(7)], "label": ["a", "b"]},
            "text, review could each be the text.*--text-column",
        ),
    ],
)
def test_what_is_not_clear_is_refused_with_what_decides(
    columns: dict[str, list[Any]], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        read(write(tmp_path / "data.csv", rows(**columns)))


def test_options_decide_and_wrong_ones_name_what_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "data.csv", rows(label=["a", "b"], category=["c", "d"], stars=[1, 2, 3]))
    assert read(path, label="category").reading.columns["label"] == "category"
    stars = read(path, family="sequence-regression", label="stars")
    assert stars.tables["train"]["label"].type == pa.float64() and stars.task.metric == "spearman"
    with pytest.raises(UserError, match=r"--label-column: unknown column 'star'. Did you mean 'stars'\?"):
        read(path, label="star")
    with pytest.raises(UserError, match=r"--family: unknown family 'regression'.*sequence-regression"):
        read(path, family="regression", label="stars")
    with pytest.raises(UserError, match=r"column 'label', row 1: not a finite number \(got 'a'\)"):
        read(path, family="sequence-regression", label="label")
    with pytest.raises(UserError, match=r"column 'stars', row 1: int is not text"):
        read(write(tmp_path / "data.jsonl", rows(label=["a", "b"], stars=[1, 2, 3])), text=("stars",), label="label")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.csv", "text,label\n", "it has no rows"),
        ("few.csv", "text,label\n" + "a b,x\nc d,y\n" * 5, "it has 10 rows that can be used; at least 20 are needed"),
        ("semicolons.tsv", "text;label\n" + "a b;x\n" * 30, "no column looks like text.*text;label"),
        ("headless.csv", "this is a row of seven whole words,1\n" + "a b,2\n" * 30, "its first line seems to be a row"),
        ("twice.csv", "text,text\n" + "a b,x\n" * 30, "the column 'text' is there twice"),
        ("data.xlsx", "", "not a kind of data file. Allowed: .parquet"),
        ("infinite.jsonl", '{"text": "a b", "label": Infinity}\n' * 30, "all 30 rows have the label 'inf'"),
    ],
)
def test_files_that_cannot_be_read_say_why(name: str, content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=reason):
        read(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "absent.csv")
    with pytest.raises(UserError, match=f"a folder, with ({name}|no data file). Give one file"):
        read(tmp_path)


def test_parts_share_no_text_and_keep_the_classes_shares_whatever_the_order(tmp_path: Path) -> None:
    table = [{"text": text(number // 2), "label": "rare" if number // 2 % 5 == 0 else "usual"} for number in range(400)]
    task = read(write(tmp_path / "data.csv", table))
    texts = [set(own["text"].to_pylist()) for own in task.tables.values()]
    assert sum(map(len, texts)) == len(set().union(*texts)) == 200
    for part, share in (("train", 0.7), ("validation", 0.1), ("test", 0.2)):
        own = task.tables[part]["label"].to_pylist()
        assert len(own) == pytest.approx(400 * share, abs=4) and own.count("rare") / len(own) == pytest.approx(
            0.2, abs=0.03
        )
    turned = read(write(tmp_path / "turned.csv", table[::-1]))
    assert {part: set(own["text"].to_pylist()) for part, own in turned.tables.items()} == {
        part: set(own["text"].to_pylist()) for part, own in task.tables.items()
    }


def test_training_rows_whose_text_is_in_the_test_file_are_left_out(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", rows(label=["a", "b"]))
    test = write(tmp_path / "test.csv", rows(10, label=["a", "b"]))
    task = read_task(train, Overrides(), test=test)
    assert task.tables["test"].num_rows == 10
    assert task.facts["left out"] == "10 training rows whose text is held out"
    assert task.tables["train"].num_rows + task.tables["validation"].num_rows == 50


def test_a_label_that_only_the_test_file_has_is_refused_with_that_file_s_name(tmp_path: Path) -> None:
    train = write(tmp_path / "reviews.csv", rows(label=["good", "bad"]))
    (test := tmp_path / "held-out.csv").write_text("text,label\none more film,good\nand another,god\n")
    message = r"test \(.*held-out\.csv\): unknown label 'god'\. Did you mean 'good'\? Allowed: bad, good"
    with pytest.raises(UserError, match=message):
        read_task(train, Overrides(), test=test)


def test_a_file_called_like_an_installed_task_gets_an_ending(tmp_path: Path) -> None:
    assert read(write(tmp_path / "sst2.csv", rows(label=["a", "b"]))).name == "sst2-file"


def test_groups_are_connected_by_any_key() -> None:
    groups = row_groups(["a", "a", "b", "c"], ["x", "y", "y", "z"])
    assert len(set(groups[:3])) == 1 and groups[3] != groups[0]
    keys = [f"k{n}" for n in range(100)]
    held = held_out_rows(row_groups(keys), keys, [""] * 100, 0.2, seed=0)
    assert held.sum() == 20 and (held != held_out_rows(row_groups(keys), keys, [""] * 100, 0.2, seed=1)).any()


def test_classes_called_as_gaps_elsewhere_or_numbers_with_a_decimal_comma_are_classes_and_pointed_out(
    tmp_path: Path,
) -> None:
    for names, told in ((["0,5", "1,0", "-2,25"], True), (["0,5", "1,0", "no"], False)):
        notes = read(write(tmp_path / "data.csv", rows(80, label=names))).notes
        assert any("numbers with a decimal comma" in note for note in notes) == told
    table = rows(100, label=["good", "bad", "nan", "NA", "-"])
    table[0]["label"], table[1]["label"] = "", "  "
    task = read(write(tmp_path / "data.csv", table))
    assert set(task.tables["train"]["label"].to_pylist()) == {"good", "bad", "nan", "NA", "-"}
    assert task.facts["left out"] == "2 without label"
    for name in ("nan", "NA", "-"):
        assert any(f"rows have the label '{name}', a class like any other" in note for note in task.notes)


@pytest.mark.parametrize("form", ["column", "object", "list", "csv"])
def test_an_answer_is_where_the_file_says_that_it_starts(tmp_path: Path, form: str) -> None:
    table: list[dict[str, Any]] = []
    for number in range(60):
        row = {"question": f"who {number}?", "context": f"Bob {number} said that Bob {number} left"}
        text, start = f"Bob {number}", row["context"].rindex("Bob")
        answers = {"object": {"text": text, "answer_start": start}, "list": {"text": [text], "answer_start": [start]}}
        table.append(row | ({"answers": answers[form]} if form in answers else {"answer": text, "answer_start": start}))
    task = read(write(tmp_path / ("data.csv" if form == "csv" else "data.jsonl"), table))
    for row in task.tables["train"].to_pylist():
        assert row["answers"]["answer_start"] == [row["context"].rindex("Bob")]
    assert "answer_start" not in task.facts.get("not used", "")


def test_a_class_label_is_called_by_its_name_and_minus_one_is_a_gap_as_datasets_has_it(tmp_path: Path) -> None:
    names, numbers = ["entailment", "neutral", "contradiction"], [number % 4 - 1 for number in range(80)]
    data = datasets.Dataset.from_dict({"text": [f"text number {number}" for number in range(80)], "label": numbers})
    data.cast_column("label", datasets.ClassLabel(names=names)).to_parquet(tmp_path / "snli.parquet")
    task = read(tmp_path / "snli.parquet")
    found = [row for table in task.tables.values() for row in table.to_pylist()]
    assert {row["text"]: row["label"] for row in found} == {
        f"text number {place}": names[number] for place, number in enumerate(numbers) if number >= 0
    }
    assert task.facts["left out"] == "20 without label" and task.facts["labels"].startswith("3: ")


def test_another_column_never_stands_in_for_a_label_that_is_a_list(tmp_path: Path) -> None:
    spans = [[[0, 4, "ORG"]], [[0, 3, "PER"], [5, 9, "ORG"]]]
    for labels in (spans, [["a", "b"], ["b"]]):
        with pytest.raises(UserError, match="labels has several labels a row, or labelled spans"):
            read(write(tmp_path / "data.jsonl", rows(labels=labels, source=["web", "book"])))
    for number, labels in enumerate(([["good"], ["bad", "good"]], ["good", ["bad"]])):
        with pytest.raises(UserError, match="one label a row is expected, not several"):
            read(write(tmp_path / f"{number}.jsonl", rows(label=labels)), label="label", text=("text",))
    task = read(write(tmp_path / "data.jsonl", rows(label=[["a"], [], ["b"]], source=["web", "book"])))
    assert task.reading.columns["label"] == "label" and task.facts["left out"] == "20 without label"


def test_rows_that_an_annotator_rejected_are_pointed_out(tmp_path: Path) -> None:
    task = read(
        write(tmp_path / "prodigy.jsonl", rows(label=["a", "b"], answer=["accept", "accept", "reject", "ignore"]))
    )
    assert any("in 30 rows it is not 'accept'" in note for note in task.notes)
    assert not read(write(tmp_path / "prodigy.jsonl", rows(label=["a", "b"], answer=["accept"]))).notes
    asked = rows(question=["who"], context=[f"Bob {n} left" for n in range(60)], answer=[["Bob"], ["left"]])
    assert not read(write(tmp_path / "asked.jsonl", asked)).notes


def test_files_that_were_joined_with_their_headers_are_refused(tmp_path: Path) -> None:
    table = rows(label=["a", "b"])
    file = write(tmp_path / "data.tsv", [*table, {"text": "text", "label": "label"}, *table])
    with pytest.raises(UserError, match=r"row 61 repeats the header \(text, label\)"):
        read(file)


@pytest.mark.parametrize("names", [["1", "2", "3"], ["2", "0", "1"]])
def test_a_number_to_predict_is_the_name_of_its_class_and_not_its_place(tmp_path: Path, names: list[str]) -> None:
    data = datasets.Dataset.from_dict(
        {"text": [f"text number {n}" for n in range(80)], "label": [n % 3 for n in range(80)]}
    )
    data = data.cast_column("label", datasets.ClassLabel(names=names))
    data.to_parquet(tmp_path / "stars.parquet")
    wanted = {row["text"]: float(data.features["label"].int2str(row["label"])) for row in data}
    task = read(tmp_path / "stars.parquet", family="sequence-regression")
    assert {row["text"]: row["label"] for own in task.tables.values() for row in own.to_pylist()} == wanted
    assert read(tmp_path / "stars.parquet").tables["train"]["label"][0].as_py() in names
    (tmp_path / "own").mkdir()
    for split in ("train", "test"):
        data.to_parquet(tmp_path / "own" / f"{split}.parquet")
    declared = load(tmp_path / "own", "sequence-regression").test
    assert dict(zip(*(declared[name].to_pylist() for name in ("text", "label")), strict=True)) == wanted


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reviews.zip", r"Unpack it, and give the files in it \(reviews.zip\)"),
        ("reviews.xlsx", r"Save the sheet as CSV in UTF-8 \(reviews.xlsx\)"),
        ("reviews.pkl.gz", "Write Parquet instead"),
    ],
)
def test_of_well_known_kinds_it_is_said_how_to_read_them(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"something")
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)
    with pytest.raises(UserError, match=message):
        load(tmp_path)
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=message):
            open_source(CorpusConfig(source=str(source)), store=tmp_path / "store")


def test_the_command_that_is_given_for_fasttext_makes_a_file_that_is_read(tmp_path: Path) -> None:
    table = rows(80, label=["good", "not-bad"])
    (tmp_path / "films.txt").write_text("".join(f"__label__{row['label']} {row['text']}\n" for row in table))
    with pytest.raises(UserError, match="fastText's lines") as error:
        read(tmp_path / "films.txt")
    command = str(error.value).partition("Make columns of them: ")[2]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    found = [row for own in read(tmp_path / "films.tsv").tables.values() for row in own.to_pylist()]
    assert {row["text"]: row["label"] for row in found} == {row["text"]: row["label"] for row in table}


def test_words_that_are_no_words_are_refused_until_their_column_is_named(tmp_path: Path) -> None:
    lines = "".join(f"bc/{n} 0 0 Bob{n} NN B-PER\nbc/{n} 0 1 left VB O\n\n" for n in range(40))
    (tmp_path / "own.conll").write_text(f"#begin document (bc); part 000\n{lines}#end document\n")
    with pytest.raises(UserError, match=r"each sentence repeats one word, such as .bc/"):
        read(tmp_path / "own.conll")
    table = read(tmp_path / "own.conll", text=("column_4",), label="column_6").tables["train"]
    assert table["tokens"][0].as_py()[1] == "left" and table["tags"][0].as_py() == ["B-PER", "O"]


def test_lists_and_objects_that_were_written_as_text_are_refused(tmp_path: Path) -> None:
    """`Dataset.to_csv` and `DataFrame.to_csv` write them so."""
    tagged = datasets.Dataset.from_dict({"tokens": [["Anna", f"w{n}"] for n in range(60)], "ner_tags": [[1, 0]] * 60})
    asked = {
        "question": ["who"] * 60,
        "context": [f"Anna {n}" for n in range(60)],
        "answers": [{"text": ["Anna"], "answer_start": [0]}] * 60,
    }
    tagged.to_csv(tmp_path / "tagged.csv")
    datasets.Dataset.from_dict(asked).to_csv(tmp_path / "asked.csv")
    tagged.to_pandas().map(list).to_csv(tmp_path / "lists.csv", index=False)
    for name in ("tagged", "asked", "lists"):
        with pytest.raises(UserError, match=r"row 1: a list or an object as text, such as pandas writes into CSV"):
            read(tmp_path / f"{name}.csv")


def test_words_in_columns_are_read_and_refused_as_the_run_does(tmp_path: Path) -> None:
    line = "{}\t{}\t{}\t{}\t_\t_\t0\troot\t_\t_\n"
    sentences = [
        f"# sent_id = {n}\n" + line.format(1, "Anna", "anna", "PROPN") + line.format(2, f"left{n}", "leave", "VERB")
        for n in range(60)
    ]
    (tmp_path / "own.conllu").write_text("\n".join(sentences))
    task = read(tmp_path / "own.conllu")
    assert set(task.tables["train"]["tags"].to_pylist()[0]) == {"PROPN", "VERB"}
    written(task, tmp_path)
    (tmp_path / "mixed.conll").write_text("\n\n".join(f"Anna B-PER\nleft{n} VERB" for n in range(60)))
    with pytest.raises(UserError, match=r"mixed\.conll\): .*Give tags of one scheme"):
        read(tmp_path / "mixed.conll")
    tagged = datasets.Dataset.from_dict(
        {"tokens": [["Anna", f"left{n}"] for n in range(60)], "ner_tags": [["B-PER", "O"]] * 60}
    )
    tagged = tagged.cast_column("ner_tags", datasets.List(datasets.ClassLabel(names=["O", "B-PER"])))
    tagged.to_parquet(tmp_path / "numbered.parquet")
    assert read(tmp_path / "numbered.parquet").tables["train"]["tags"].to_pylist()[0] == ["B-PER", "O"]
