"""Layouts of published files besides plain tables: SQuAD's JSON, words and tags in columns, and TREC's judgements.

- SQuAD's JSON, v1.1 and v2.0 (`.json`). The columns are those of the data set on the Hub.
- A word and its tags on each line, with an empty line after each sentence, as in CoNLL-2003, UNER and CoNLL-U (`.conll`,
  `.conllu`, `.iob2`, `.bio`, `.txt`). The columns are the task's tokens and tags, and `column_1`, `column_2` and so on.
- TREC's judgements: query, 0, document and score (`.qrels`, `.trec`, `.txt`, `.tsv`, `.csv`). The columns are the task's
  query_id, corpus_id and score.
- CSV and TSV whose first line is a row of data. The columns are those of the task's `header`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.errors import UserError, one_line
from mlmclm.storage.data_files import DELIMITERS, TABLES, kind_of, lines_of, read_start, read_table, read_text

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (*TABLES, ".conll", ".conllu", ".iob2", ".bio", ".qrels", ".trec", ".txt")
"""Suffixes of the files of a task, in order of preference."""
DOCUMENT = "-DOCSTART-"
"""The word on the line that begins a document in CoNLL-2003."""
_COMMENT = re.compile(r"#\s*\w+( id)?\s*=|#\s*new(doc|par)\b|#\s+id\s|#.*\s\w+=|#(begin|end) document\b")
"""A comment of CoNLL-U (`# sent_id = 3`), MultiCoNER (`# id 4f2 domain=en`) or CoNLL-2012 (`#begin document`). A line for
the word "#" doesn't match."""
_CONLLU = 10
"""The number of columns of CoNLL-U, of which the fourth is the universal part of speech."""
_PARTIAL = re.compile(r"\d+[-.]\d+")
"""The number of a CoNLL-U line that isn't one word: a contraction (3-4), or a word that is not in the text (3.1)."""
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_ROUND = re.compile(r"Q0|[0-9]+(\.[0-9]+)?")
"""The second field of a judgement: usually 0, and in TREC-COVID the round of judging. It is not used."""


def read_layout(
    path: Path, column: Callable[[str], str], header: Sequence[str] | None = None, *, judged: bool = False
) -> pa.Table:
    """Read a file of a task into a table, whatever its layout.

    Args:
        column: returns the name that the task expects for a canonical column (`tokens`, `query_id`).
        header: see `Task.header`.
        judged: whether the task is a retrieval task, whose files other than tables are judgements. In other tasks they
            are words in columns.

    Raises:
        UserError: the file can't be read; the message names it and, in a text file, the line.
    """
    kind = kind_of(path)
    if kind not in TABLES:
        if read_start(path).startswith("__label__"):
            raise UserError(
                rf"{path}: fastText's lines (__label__NAME text) are not read. Make columns of them: (printf 'label\ttext\n'; "
                rf"sed -E 's/^__label__(\S+)\s+/\1\t/' {path.name}) > {path.stem}.tsv"
            )
        return _judgements(path, column) if judged else _words(path, column)
    if kind in DELIMITERS and judged and _is_judgement(_fields(read_start(path).partition("\n")[0])):
        return _judgements(path, column)
    table = _squad(path) if kind == ".json" else None
    return read_table(path, header) if table is None else table


def _squad(path: Path) -> pa.Table | None:
    """Return the questions of a file in SQuAD's layout; None for any other JSON file."""
    import pyarrow as pa

    start = read_start(path)
    if not start.lstrip().startswith("{") or '"paragraphs"' not in start:
        return None
    try:
        articles = json.loads(read_text(path)).get("data")
    except (json.JSONDecodeError, RecursionError):  # one object a line, or damaged
        return None
    if not isinstance(articles, list) or not all(
        isinstance(article, dict) and isinstance(article.get("paragraphs"), list) for article in articles
    ):
        return None
    rows = []
    answers_of = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int64()))])
    kinds = {**dict.fromkeys(("id", "title", "context", "question"), pa.string()), "answers": answers_of}
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = question.get("answers") or []
                    rows.append(
                        {
                            "id": str(question["id"]),
                            "title": article.get("title", ""),
                            "context": paragraph["context"],
                            "question": question["question"],
                            "answers": {
                                name: [answer[name] for answer in answers] for name in ("text", "answer_start")
                            },
                        }
                    )
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        raise UserError(
            f"{path}: question {len(rows) + 1} or its paragraph is not in SQuAD's layout: {reason}."
        ) from error
    try:
        return pa.Table.from_pylist(rows, schema=pa.schema(list(kinds.items())))
    except (pa.ArrowException, ValueError) as error:
        raise UserError(f"{path}: not in SQuAD's layout: {one_line(error)}.") from error


def _fields(line: str) -> list[str]:
    """Return the fields of a line between spaces and tabs; other white space, such as U+00A0, is part of a field."""
    return re.split("[ \t]+", line.strip(" \t\r\n"))


def _is_judgement(fields: Sequence[str]) -> bool:
    return len(fields) == 4 and bool(_ROUND.fullmatch(fields[1]) and _WHOLE.fullmatch(fields[3]))


def _judgements(path: Path, column: Callable[[str], str]) -> pa.Table:
    import pyarrow as pa

    rows = []
    for number, line in enumerate(lines_of(path), 1):
        fields = _fields(line)
        if fields == [""]:
            continue
        if not _is_judgement(fields):
            raise UserError(
                f"{path}, line {number}: not a judgement in TREC's layout (query, 0, document, whole number): "
                f"{line.rstrip()[:80]!r}."
            )
        rows.append((fields[0], fields[2], int(fields[3])))
    return pa.table(
        {
            column("query_id"): pa.array([row[0] for row in rows], pa.string()),
            column("corpus_id"): pa.array([row[1] for row in rows], pa.string()),
            column("score"): pa.array([row[2] for row in rows], pa.int64()),
        }
    )


def _words(path: Path, column: Callable[[str], str]) -> pa.Table:
    """Read sentences of words in columns: the word is in the first column and its tag in the last.

    If the first column numbers the words, word and tag are in the second and third column, as in UNER, or in the second and
    fourth, as in CoNLL-U.
    """
    import pyarrow as pa

    sentences = _numbered(_sentences(path, lines_of(path), re.compile("#")))
    numbered = sentences is not None
    if sentences is None:
        sentences = _sentences(path, lines_of(path), _COMMENT)
    width = len(sentences[0][0]) if sentences else 2
    columns = {
        f"column_{place + 1}": [[fields[place] for fields in sentence] for sentence in sentences]
        for place in range(width)
    }
    word, tag = "column_1", f"column_{width}"
    if numbered:
        word, tag = "column_2", "column_4" if width == _CONLLU else "column_3"
    # A task may name columns by their numbers.
    columns = {column("tokens"): columns[word], column("tags"): columns[tag], **columns}
    return pa.table({name: pa.array(values, pa.list_(pa.string())) for name, values in columns.items()})


def _numbered(sentences: list[list[list[str]]]) -> list[list[list[str]]] | None:
    """Return the sentences without the lines that aren't one word, if the first column numbers the words; else None."""
    if not sentences or len(sentences[0][0]) < 3:
        return None
    # Only where words are numbered: elsewhere 2-1 and 3.5 are words.
    words = [[fields for fields in sentence if not _PARTIAL.fullmatch(fields[0])] for sentence in sentences]
    for sentence in words:
        if not sentence or [fields[0] for fields in sentence] != [str(place + 1) for place in range(len(sentence))]:
            return None
    return words


def _sentences(path: Path, lines: Iterable[str], comment: re.Pattern[str]) -> list[list[list[str]]]:
    """Return the fields of each line of each sentence. All lines of a file must have the same number of fields.

    Args:
        comment: matches the beginning of a comment line. Comments come before a sentence.
    """
    sentences: list[list[list[str]]] = [[]]
    width, tabs = 0, False
    for number, line in enumerate(lines, 1):
        if not line.strip(" \t\r\n") or line.startswith(DOCUMENT):
            sentences.append([])
            continue
        if not sentences[-1] and comment.match(line):
            continue
        if not width:
            tabs = "\t" in line
        # Tabs and spaces at the end of a line don't count; some programs write an empty column there.
        fields = [field.strip(" ") for field in line.rstrip(" \t\r\n").split("\t")] if tabs else _fields(line)
        expected = "A word and its tags are expected on each line."
        if len(fields) < 2:
            raise UserError(f"{path}, line {number}: there is one field. {expected}")
        if width and len(fields) != width:
            raise UserError(
                f"{path}, line {number}: {len(fields)} fields, where the lines before have {width}. {expected}"
            )
        width = len(fields)
        sentences[-1].append(fields)
    return [sentence for sentence in sentences if sentence]
