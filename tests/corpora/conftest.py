"""A tiny environment of packages, and tiny corpora."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mlmclm.corpora import process_map
from mlmclm.pydocs import documentation as pydocs
from small_words import WORDS

IMPORTED = "raise SystemExit('imported!')\n\n"


def sentence(generator: random.Random, words: int = 10) -> str:
    """A sentence of random words."""
    text = " ".join(generator.choice(WORDS) for _ in range(words))
    return f"{text.capitalize()}."


def numpydoc(generator: random.Random) -> str:
    """A docstring in numpydoc's form."""
    names = generator.sample(WORDS, 3)
    fields = "\n".join(f"    {name} : int, optional\n        {sentence(generator)}" for name in names)
    return "\n\n".join(
        [
            sentence(generator),
            f"    {sentence(generator, 14)}",
            f"    Parameters\n    ----------\n{fields}",
            f"    Returns\n    -------\n    list of str\n        {sentence(generator)}",
            f"    Raises\n    ------\n    ValueError\n        If {sentence(generator).lower()}",
            f"    Notes\n    -----\n    {sentence(generator, 12)}\n    ",
        ]
    )


def google(generator: random.Random) -> str:
    """A docstring in Google's form."""
    names = generator.sample(WORDS, 3)
    fields = "\n".join(f"        {name} (str): {sentence(generator)}" for name in names)
    return (
        f"{sentence(generator)}\n\n    {sentence(generator, 14)}\n\n    Args:\n{fields}\n\n    Returns:\n"
        f"        bool: {sentence(generator)}\n\n    Raises:\n        KeyError: If {sentence(generator).lower()}\n    "
    )


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do all work in this process, unless a test has another number of processors."""
    monkeypatch.setattr(process_map, "usable_cpus", lambda: 1)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twenty documented packages; each raises when it is imported."""
    root = tmp_path_factory.mktemp("packages")
    for number in range(20):
        generator = random.Random(number)
        folder = root / f"package{number:02d}"
        folder.mkdir()
        docstring = f'"""Package {number} has {sentence(generator)}"""\n'
        (folder / "__init__.py").write_text(docstring + IMPORTED)
        make = (numpydoc, google)[number % 2]
        functions = [f'def function_{n}():\n    """{make(generator)}"""\n' for n in range(15)]
        (folder / "code.py").write_text(IMPORTED + "\n\n".join(functions))
    return root


@pytest.fixture
def environment(packages: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The packages in place of the installed ones."""
    roots = [packages / "no standard library", packages]
    monkeypatch.setattr(pydocs, "installed_roots", lambda: roots)
    return roots


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Four hundred different documents."""
    generator = random.Random(0)
    return [" ".join(sentence(generator) for _ in range(generator.randint(1, 8))) for _ in range(400)]


@pytest.fixture(scope="session")
def lines(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents as JSON lines."""
    path = tmp_path_factory.mktemp("lines") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts)))
    return path
