"""CSV files have no cell that a spreadsheet takes for a formula, and give back the texts that went in."""

from __future__ import annotations

import csv
import io
import random
import re
from pathlib import Path

import pandas as pd
import pytest

import mlmclm
from mlmclm.storage.csv_text import MARK, csv_text, safe_cell

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def is_safe(cell: str) -> bool:
    if not cell.startswith(FORMULA):
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return True


def test_any_text_comes_back_and_is_no_formula() -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices("=+-@\t\r' a1.e,\"\n", k=chance.randrange(6))) for _ in range(3000)]
    written = csv_text(pd.DataFrame({"=name": texts, "number": [-0.5] * len(texts)}))
    header, *rows = csv.reader(io.StringIO(written, newline=""))
    assert header == ["'=name", "number"] and all(number == "-0.5" for _, number in rows)
    assert all(is_safe(cell) for cell, _ in rows)
    assert [cell.removeprefix(MARK) for cell, _ in rows] == texts


@pytest.mark.parametrize("value", ["-0.5", "+1", "-1e-3", "a=b", "", -3, None, True])
def test_numbers_and_other_texts_stay_as_they_are(value: object) -> None:
    assert safe_cell(value) == value


def test_every_csv_file_of_the_package_is_written_this_way() -> None:
    package = Path(mlmclm.__file__).parent
    sources = {file.name: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    assert {name for name, source in sources.items() if ".to_csv(" in source} == {"csv_text.py"}
    row_by_row = [source for source in sources.values() if re.search(r"csv\.(Dict)?[wW]riter\(", source)]
    assert row_by_row and all("safe_cell(" in source for source in row_by_row)
