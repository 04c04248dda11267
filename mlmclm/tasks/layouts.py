"""Layouts of published files besides plain tables: SQuAD's JSON, words and tags in columns, and TREC's judgements.

- SQuAD's JSON, v1.1 and v2.0 (`.json`). The columns are those of the data set on the Hub.
- A word and its tags on each line, with an empty line after each sentence, as in CoNLL-2003 and UNER (`.conll`,
  `.iob2`, `.bio`, `.txt`). The columns are the task's tokens and tags, and `column_1`, `column_2` and so on.
- TREC's judgements: query, 0, document and score (`.qrels`, `.trec`, `.txt`, `.tsv`). The columns are the task's
  query_id, corpus_id and score.
- CSV and TSV whose first line is a row. The columns are those of the task's `header`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.errors import UserError
from mlmclm.storage.data_files import DELIMITERS, TABLES, kind_of, open_text, read_table, read_text

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (*TABLES, ".conll", ".iob2", ".bio", ".qrels", ".trec", ".txt")
"""Suffixes of the files of a task, in order of preference."""
DOCUMENT = "-DOCSTART-"
"""The word on the line that begins a document in CoNLL-2003."""
_COMMENT = re.compile(r"#\s*\w+( id)?\s*=|#\s*new(doc|par)\b")
"""A comment of CoNLL-U, such as `# sent_id = 3`. A line whose word is a number sign doesn't look like this."""
_PARTIAL = re.compile(r"\d+[-.]\d+")
"""The number of a line of CoNLL-U that is no word of its own: a contraction, or a word that is not in the text."""


def read_layout(path: Path, column: Callable[[str], str], header: Sequence[str] | None = None) -> pa.Table:
    """Read a file of a task into a table, whatever its layout.

    Args:
        column: returns the name that the task expects for a canonical column (`tokens`, `query_id`).
        header: see `Task.header`.

    Raises:
        UserError: the file can't be read; the message names it and, in a text file, the line.
    """
    kind = kind_of(path)
    if kind in DELIMITERS:
        with open_text(path) as file:
            first = file.readline()
        if _is_judgement(first.split()):
            return _judgements(path, column)
        return read_table(path, _names(path, next(csv.reader([first], delimiter=DELIMITERS[kind]), []), header))
    if kind not in TABLES:
        first = next((line for line in read_text(path).splitlines() if line.strip()), "")
        return _judgements(path, column) if _is_judgement(first.split()) else _words(path, column)
    if kind == ".json":
        found = _squad(path)
        if found is not None:
            return found
    return read_table(path)


def _names(path: Path, first: Sequence[str], header: Sequence[str] | None) -> Sequence[str] | None:
    """Return `header` if a file's first line is a row, and None if it names the columns."""
    if header is None or set(first) & set(header):
        return None
    if len(first) != len(header):
        raise UserError(
            f"{path}: its first line has {len(first)} fields, none of them a name of the task's header, which names {len(header)}: "
            f"{', '.join(header)}."
        )
    return header


def _squad(path: Path) -> pa.Table | None:
    """Return the questions of a file in SQuAD's layout; None for any other JSON file."""
    import pyarrow as pa

    text = read_text(path)
    if not text.lstrip().startswith("{") or '"paragraphs"' not in text:
        return None
    try:
        articles = json.loads(text).get("data")
    except json.JSONDecodeError:  # one object a line
        return None
    if not isinstance(articles, list):
        return None
    rows = []
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = asked.get("answers") or []
                    rows.append(
                        {
                            "id": asked["id"],
                            "title": article.get("title", ""),
                            "context": paragraph["context"],
                            "question": asked["question"],
                            "answers": {
                                name: [answer[name] for answer in answers] for name in ("text", "answer_start")
                            },
                        }
                    )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not in SQuAD's layout after all: question {len(rows) + 1} or its paragraph lacks {error}."
        ) from error
    answers_of = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int64()))])
    kinds = {**dict.fromkeys(("id", "title", "context", "question"), pa.string()), "answers": answers_of}
    return pa.Table.from_pylist(rows, schema=pa.schema(list(kinds.items())))


def _is_judgement(fields: Sequence[str]) -> bool:
    return len(fields) == 4 and fields[1] in ("0", "Q0") and fields[3].removeprefix("-").isdigit()


def _judgements(path: Path, column: Callable[[str], str]) -> pa.Table:
    import pyarrow as pa

    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        fields = line.split()
        if fields and not _is_judgement(fields):
            raise UserError(
                f"{path}, line {number}: not a judgement in TREC's layout (query, 0, document, score): {line[:80]!r}."
            )
        if fields:
            rows.append((fields[0], fields[2], int(fields[3])))
    queries, documents, scores = zip(*rows, strict=True)
    return pa.table(
        {
            column("query_id"): pa.array(queries, pa.string()),
            column("corpus_id"): pa.array(documents, pa.string()),
            column("score"): pa.array(scores, pa.int64()),
        }
    )


def _words(path: Path, column: Callable[[str], str]) -> pa.Table:
    """Read sentences of words in columns: the word is in the first column and its tag in the last.

    Where the first column numbers the words, as in CoNLL-U and UNER, they are in the second and third.
    """
    import pyarrow as pa

    sentences = _sentences(path, read_text(path).splitlines())
    width = len(sentences[0][0]) if sentences else 2
    if width < 2:
        raise UserError(f"{path}: a word and its tag are expected on each line, and there is one field.")
    numbered = width > 2 and all(
        [fields[0] for fields in sentence] == [str(number + 1) for number in range(len(sentence))]
        for sentence in sentences
    )
    columns = {
        f"column_{place + 1}": [[fields[place] for fields in sentence] for sentence in sentences]
        for place in range(width)
    }
    word, tag = ("column_2", "column_3") if numbered else ("column_1", f"column_{width}")
    # A task may name columns by their numbers.
    columns = {column("tokens"): columns[word], column("tags"): columns[tag], **columns}
    return pa.table({name: pa.array(values, pa.list_(pa.string())) for name, values in columns.items()})


def _sentences(path: Path, lines: Iterable[str]) -> list[list[list[str]]]:
    """Return the fields of each line of each sentence; all lines of a file have the same number of them."""
    sentences: list[list[list[str]]] = [[]]
    width, tabs = 0, False
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(DOCUMENT):
            sentences.append([])
            continue
        if not sentences[-1] and _COMMENT.match(line):
            continue
        if not width:
            tabs = "\t" in line
        fields = [field.strip() for field in line.split("\t")] if tabs else line.split()
        if width and len(fields) != width:
            raise UserError(f"{path}, line {number}: {len(fields)} fields, where the lines before have {width}.")
        width = len(fields)
        if not _PARTIAL.fullmatch(fields[0]) or width < 3:
            sentences[-1].append(fields)
    return [sentence for sentence in sentences if sentence]
