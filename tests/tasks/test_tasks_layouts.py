"""Files as they are published (SQuAD's JSON, CoNLL's columns, TREC's judgements, TSV without a header) are read as the
same tables in Parquet are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlmclm.errors import UserError
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.layouts import read_layout
from mlmclm.tasks.load import load_task
from small_models import write_entities, write_questions, write_retrieval, write_table


def load(name: str, root: Path) -> Any:
    return load_task(get_task(name), store=Path("unused"), data_root=root)


def plain(name: str) -> str:
    return name


def rewritten(root: Path, name: str, suffix: str, text: Callable[[list[dict[str, Any]]], str]) -> None:
    """Replaces the Parquet file of a split by a text file."""
    file = root / f"{name}.parquet"
    rows = pq.read_table(file).to_pylist()
    file.with_suffix(suffix).write_text(text(rows), encoding="utf-8")
    file.unlink()


def squad(rows: list[dict[str, Any]]) -> str:
    """The rows in SQuAD v2's layout; all questions on one passage are in one paragraph."""
    paragraphs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        answers = [dict(zip(row["answers"], pair, strict=True)) for pair in zip(*row["answers"].values(), strict=True)]
        asked = {"id": row["id"], "question": row["question"], "answers": answers, "is_impossible": not answers}
        paragraphs.setdefault(row["context"], []).append(asked)
    listed = [{"context": context, "qas": asked} for context, asked in paragraphs.items()]
    return json.dumps({"version": "v2.0", "data": [{"title": "", "paragraphs": [each]} for each in listed]})


@pytest.mark.parametrize("unanswerable", [False, True])
def test_squad_s_json_gives_the_questions_that_parquet_gives(tmp_path: Path, unanswerable: bool) -> None:
    task = get_task("squad_v2" if unanswerable else "squad_4k")
    write_questions(tmp_path, unanswerable=unanswerable)
    folder = tmp_path / task.name
    expected = {file.stem: pq.read_table(file).to_pylist() for file in folder.glob("*.parquet")}
    for split in expected:
        rewritten(folder, split, ".json", squad)
        found = read_layout(folder / f"{split}.json", plain).to_pylist()
        # Questions on one passage stand together in the JSON.
        assert sorted(found, key=lambda row: row["id"]) == sorted(expected[split], key=lambda row: row["id"])
    data = load(task.name, tmp_path)
    assert len(data.train) + len(data.validation) == len(expected["train"])
    assert len(data.test) == len(expected["validation"])


def conll(rows: list[dict[str, Any]]) -> str:
    """Four columns, as in CoNLL-2003."""
    names = get_task("conll2003").label_names or ()
    sentences = (
        "\n".join(f"{word} NN B-NP {names[tag]}" for word, tag in zip(row["tokens"], row["ner_tags"], strict=True))
        for row in rows
    )
    return "-DOCSTART- -X- -X- O\n\n" + "\n\n".join(sentences) + "\n"


def iob2(rows: list[dict[str, Any]]) -> str:
    """Numbered words between tabs with comments, as in UNER."""
    names = get_task("conll2003").label_names or ()
    text = ""
    for number, row in enumerate(rows):
        text += f"# sent_id = {number}\n# text = {' '.join(row['tokens'])}\n"
        pairs = enumerate(zip(row["tokens"], row["ner_tags"], strict=True), 1)
        text += "".join(f"{place}\t{word}\t{names[tag]}\t-\t-\n" for place, (word, tag) in pairs) + "\n"
    return text


@pytest.mark.parametrize(("suffix", "layout"), [(".txt", conll), (".conll", conll), (".iob2", iob2)])
def test_words_in_columns_give_the_task_that_parquet_gives(
    tmp_path: Path, suffix: str, layout: Callable[[list[dict[str, Any]]], str]
) -> None:
    write_entities(tmp_path)
    expected = load("conll2003", tmp_path).fingerprint
    for split in ("train", "validation", "test"):
        rewritten(tmp_path / "conll2003", split, suffix, layout)
    # As CoNLL-2003 calls it.
    (tmp_path / "conll2003" / f"validation{suffix}").rename(tmp_path / "conll2003" / f"valid{suffix}")
    assert load("conll2003", tmp_path).fingerprint == expected


@pytest.mark.parametrize(
    "comment",
    [
        "# id 00000000-aaaa\tdomain=en",
        "# id 4",
        "# sent_id = 3",
        "#begin document (a/b); part 000",
        "# newdoc",
        "# x y domain=en",
    ],
)
@pytest.mark.parametrize("divider", [" ", "\t"])
def test_a_comment_before_a_sentence_is_no_word_whatever_its_width(tmp_path: Path, comment: str, divider: str) -> None:
    """MultiCoNER's comments have as many fields as its lines."""
    text = f"{comment}\nAnna _ _ B-PER\nleft _ _ O\n\n{comment}\n# _ _ O\n".replace(
        " _ _ ", f"{divider}_{divider}_{divider}"
    )
    (tmp_path / "train.conll").write_text(text)
    assert read_layout(tmp_path / "train.conll", plain)["tokens"].to_pylist() == [["Anna", "left"], ["#"]]


@pytest.mark.parametrize("suffix", ["conll", "conllu", "txt"])
def test_the_tags_of_conll_u_are_the_universal_parts_of_speech(tmp_path: Path, suffix: str) -> None:
    line = "{}\t{}\t{}\t{}\tNN\t_\t0\troot\t_\t_\n"
    words = (
        ("1-2", "du", "_", "_"),
        (1, "de", "de", "ADP"),
        (2, "le", "le", "DET"),
        (3, "chat", "chat", "NOUN"),
        ("3.1", "x", "x", "X"),
    )
    (tmp_path / f"train.{suffix}").write_text(
        "# sent_id = 1\n# text = du chat\n" + "".join(line.format(*word) for word in words)
    )
    table = read_layout(tmp_path / f"train.{suffix}", plain)
    assert table.select(["tokens", "tags", "column_3"]).to_pylist() == [
        {"tokens": ["de", "le", "chat"], "tags": ["ADP", "DET", "NOUN"], "column_3": ["de", "le", "chat"]}
    ]


@pytest.mark.parametrize("strange", ["\u2028", "\x85", "\x0c", "\x1c", "\u00a0"])
def test_only_line_feeds_end_lines_and_only_spaces_and_tabs_divide_them(tmp_path: Path, strange: str) -> None:
    word = f"a{strange}b"
    for file, text in {"words.conll": f"{word} O\r\nc O\r\n", "judged.qrels": f"q 0 {word} 1\n"}.items():
        (tmp_path / file).write_text(text, encoding="utf-8", newline="")
    assert read_layout(tmp_path / "words.conll", plain)["tokens"].to_pylist() == [[word, "c"]]
    assert read_layout(tmp_path / "judged.qrels", plain, judged=True)["corpus_id"].to_pylist() == [word]


@pytest.mark.parametrize("suffix", [".txt", ".qrels", ".tsv"])
def test_trec_s_judgements_give_the_task_that_parquet_gives(tmp_path: Path, suffix: str) -> None:
    write_retrieval(tmp_path)
    expected = load("reqa_squad", tmp_path).fingerprint
    rewritten(
        tmp_path / "reqa_squad",
        "qrels",
        suffix,
        lambda rows: "".join(f"{row['query-id']} 0 {row['corpus-id']} {row['score']}\n" for row in rows),
    )
    assert load("reqa_squad", tmp_path).fingerprint == expected


COLA = "gj04\t1\t\tOur friends won't buy this analysis.\ngj04\t0\t*\tThey drank the pub.\n"


@pytest.mark.parametrize("header", ["", "source\tlabel\toriginal_label\tsentence\n"])
def test_cola_is_read_with_and_without_a_header(tmp_path: Path, header: str) -> None:
    sentences = {"sentence": ["Our friends won't buy this analysis.", "They drank the pub."] * 20, "label": [1, 0] * 20}
    for split in ("train", "validation"):
        write_table(tmp_path / "parquet" / "cola", split, sentences)
    (tmp_path / "tsv" / "cola").mkdir(parents=True)
    for file in ("train.tsv", "dev.tsv"):
        (tmp_path / "tsv" / "cola" / file).write_text(header + COLA * 20)
    assert load("cola", tmp_path / "tsv").fingerprint == load("cola", tmp_path / "parquet").fingerprint


def test_a_first_line_that_is_a_row_is_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    with gzip.open(tmp_path / "sst2" / "train.tsv.gz", "wt") as file:
        file.write("a lovely film\t1\na dull one\t0\n")
    with pytest.raises(UserError, match=r"If the file's first line is a row, .* header: \[\.\.\., \.\.\.\]"):
        load("sst2", tmp_path)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Anna\tB-PER\t\nleft\tO\t \n\t\nBob\tB-PER\n", [["Anna", "left"], ["Bob"]]),  # tabs at an end don't count
        ("# SYM O\n1 CD B-NUM\n\nthe DT O\n", [["#", "1"], ["the"]]),  # a word, and no comment
        ("won VBD O\n2-1 CD O\n14.2 CD O\n\n6-4 CD O\n", [["won", "2-1", "14.2"], ["6-4"]]),  # no contractions
        # Before numbered words, any line with a number sign is a comment.
        ("#\tx\t[2009]\n1-2\tdu\t_\n1\tde\tO\n2\tle\tO\n2.1\tx\t_\n\n1\t#\tO\n", [["de", "le"], ["#"]]),
    ],
)
def test_words_that_look_like_something_else_are_words(tmp_path: Path, text: str, tokens: list[list[str]]) -> None:
    (tmp_path / "train.conll").write_text(text)
    assert read_layout(tmp_path / "train.conll", plain)["tokens"].to_pylist() == tokens


def test_a_table_in_any_folder_comes_before_text_beside_it(tmp_path: Path) -> None:
    write_entities(tmp_path)
    expected, folder = load("conll2003", tmp_path).fingerprint, tmp_path / "conll2003"
    (folder / "data").mkdir()
    for file in folder.glob("*.parquet"):
        file.rename(folder / "data" / file.name)
        (folder / f"{file.stem}.txt").write_text("Some prose.\n")
    assert load("conll2003", tmp_path).fingerprint == expected


def asked(**changed: Any) -> str:
    question = {"id": "1", "question": "q", "answers": [], **changed}
    return json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [question]}]}]})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", asked().replace('"question"', '"x"'), "question 1 or its .* SQuAD's layout: 'question' is missing"),
        ("a.json", asked(answers=[{"text": "a", "answer_start": "0"}]), "not in SQuAD's layout"),
        ("a.json", asked(question="\ud800"), "not in SQuAD's layout"),
        ("a.qrels", "q1 0 d1 1\nq2 0 d2\n", "line 2: not a judgement in TREC's layout .*'q2 0 d2'"),
        ("a.qrels", "q1 0 d1 1.5\n", "line 1: not a judgement"),
        ("a.qrels", "q1 0 d1 99999999999999999999\n", "line 1: not a judgement"),
        ("a.conll", "a O\nb O\nc\n", "line 3: there is one field"),
        ("a.conll", "a O\nb O\nc NN O\n", "line 3: 3 fields, where .* have 2"),
        ("a.csv", "a,b,c\n", "its first line has 3 fields, .* which names 2: label, text"),
    ],
)
def test_what_is_not_in_its_layout_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}[:,] .*{message}"):
        read_layout(tmp_path / name, plain, ("label", "text"), judged=name == "a.qrels")


def test_what_is_allowed_in_other_layouts_too_is_read(tmp_path: Path) -> None:
    for name, text in (
        ("lines.json", '{"paragraphs": "a", "data": 1}\n{"paragraphs": "b", "data": 2}\n'),
        ("object.json", '{"data": [1, 2], "paragraphs": "a"}\n'),
        ("numbered.json", asked(id=7)),
        ("rounds.qrels", "q1 0.5  d1\t-1\n\nq1 Q0 d2 2\n\n"),
        ("train.tsv", "film\t0\tgood\t4\nfilm\t1\tbad\t3\n"),
    ):
        (tmp_path / name).write_text(text)
    assert set(read_layout(tmp_path / "lines.json", plain).column_names) == {"paragraphs", "data"}
    assert read_layout(tmp_path / "object.json", plain).column_names == ["data", "paragraphs"]
    assert read_layout(tmp_path / "numbered.json", plain)["id"].to_pylist() == ["7"]
    assert read_layout(tmp_path / "rounds.qrels", plain, judged=True)["score"].to_pylist() == [-1, 2]
    assert len(read_layout(tmp_path / "train.tsv", plain, ("a", "b", "c", "d"))) == 2  # judgements in a retrieval task


OWN = {
    "name": "own", "family": "token-classification", "title": "Own", "source": "local", "folder": "own", "metric": "f1",
    "splits": {"train": "train", "validation": "validation", "test": "test"}, "licence": "-", "citation": "-",
}  # fmt: skip


def load_own(root: Path, **changes: Any) -> Any:
    return load_task(Task.model_validate(OWN | changes), store=Path("unused"), data_root=root)


def test_iob1_is_converted_to_iob2_if_the_training_table_has_it_throughout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = [("I-PER B-PER O I-LOC", "B-PER B-PER O B-LOC"), ("I-LOC I-LOC O I-PER", "B-LOC I-LOC O B-PER")]
    (tmp_path / "own").mkdir()

    def written(split: str, form: int, more: str = "") -> None:
        lines = ("\n".join(f"w{n} {tag}" for n, tag in enumerate(pair[form].split())) for pair in sentences * 5)
        (tmp_path / "own" / f"{split}.conll").write_text("\n\n".join(lines) + more)

    for form in (1, 0):
        for split in ("train", "validation", "test"):
            written(split, form)
        found = load_own(tmp_path)
        names = found.label_names
        assert names == ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")[: len(names)]
        for table in (found.train, found.validation, found.test):
            tags = [[names[tag] for tag in row] for row in table["tags"].to_pylist()[:2]]
            assert tags == [pair[1].split() for pair in sentences]
    assert "they are converted to IOB2" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(UserError, match=r"the tags are IOB1.*label_names lacks B-LOC. Add it\."):
        load_own(tmp_path, label_names=["O", "B-PER", "I-LOC", "I-PER"])
    # The training table decides for all splits: with one entity there that begins with B-, none is converted.
    written("train", 0, "\n\nRome B-LOC\nw I-LOC\n")
    slipped = load_own(tmp_path)
    assert [slipped.label_names[tag] for tag in slipped.test["tags"].to_pylist()[0]] == sentences[0][0].split()


def test_tags_that_are_numbers_keep_them_as_iob1_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    """Names that the data carries may lack a B-, as no two persons of CoNLL-2003 stand side by side."""
    feature = {"_type": "List", "feature": {"_type": "ClassLabel", "names": ["O", "I-PER", "I-LOC", "B-LOC"]}}
    metadata = {b"huggingface": json.dumps({"info": {"features": {"tags": feature}}}).encode()}
    (tmp_path / "own").mkdir()

    def loaded(second: list[int | None]) -> Any:
        rows = pa.table({"tokens": [["Anna", "in", "Paris"], ["Rome", "Oslo"]] * 8, "tags": [[1, 0, 2], second] * 8})
        for split in ("train", "validation", "test"):
            pq.write_table(rows.replace_schema_metadata(metadata), tmp_path / "own" / f"{split}.parquet")
        return load_own(tmp_path)

    found = loaded([2, 3])
    tags = [[found.label_names[tag] for tag in row] for row in found.test["tags"].to_pylist()[:2]]
    assert tags == [["B-PER", "O", "B-LOC"], ["B-LOC", "B-LOC"]]
    # Without any B- in the data they are IO, and stay as they are.
    assert loaded([2, 2]).train["tags"].to_pylist()[:2] == [[1, 0, 2], [2, 2]]
    for wrong, message in ((None, "null"), (-1, "tag -1 is outside")):
        with pytest.raises(UserError, match=message):
            loaded([2, wrong])


@pytest.mark.parametrize("first", ['"an open mark', "x" * 200_000, '"two\nlines"', "\ufeffa mark"])
def test_the_first_row_of_a_file_without_header_is_read_as_the_others_are(tmp_path: Path, first: str) -> None:
    (tmp_path / "train.tsv").write_text(f"\n{first}\t1\nb\t0\n\n".lstrip("\n" if first[0] == "\ufeff" else ""))
    table = read_layout(tmp_path / "train.tsv", plain, ("text", "label"))
    text = first.strip('\ufeff"') if first.count('"') != 1 else first
    assert table.to_pylist() == [{"text": text, "label": "1"}, {"text": "b", "label": "0"}]
