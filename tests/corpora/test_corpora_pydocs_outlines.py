"""Outlines of sources: the docstrings of the whole source, with less to parse."""

from __future__ import annotations

import argparse
import ast
import asyncio.base_events
import dataclasses
import inspect
import tarfile
import textwrap
import typing
from types import ModuleType

import pytest

from mlmclm.pydocs.documentation import docstrings
from mlmclm.pydocs.outlines import outline

MODULES = (argparse, asyncio.base_events, dataclasses, inspect, tarfile, textwrap, typing)


def of_whole(source: bytes, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    with monkeypatch.context() as patched:
        patched.setattr("mlmclm.pydocs.documentation.outline", lambda whole: whole)
        return list(docstrings(source, "package.module"))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_an_outline_has_the_docstrings_of_its_source(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(module).encode()
    assert len(outline(source)) < 0.8 * len(source)
    ast.parse(outline(source))
    found = docstrings(source, "package.module")
    assert found == of_whole(source, monkeypatch) != []


@pytest.mark.parametrize(
    "source",
    [
        'def f(a: dict = {"x": (1, 2)}, *, b="):") -> "a: b":\n    """Says what it does."""\n    return """\ndef g(): pass\n"""\n',
        "def f():  # a comment: '\n    # another \"\"\"\n\n    u'''Says what it does.'''\n",
        'def f(): "Says what it does."\nclass C:\n\tdef g(self):\n\t\tr"""Says \\" more."""\n\t\treturn 1\n\tdef h(self):\n\t\tx = [\n1,\n]\n',
        'def f():\n    """Says what""" " it does."\n    x = 1\n',
        'def f():\n    "Says what" \\\n    """ it does."""\n    x = 1\n',
        'def f():\n    ("""Says what it does."""\n    """ And more.""")\n',
        'def f():\n    x = f"{1}"\n    """Says nothing at all."""\nif x:\n    @property\n    def g():\n        """Says what it does."""',
        'class C:\n    """Says what it does."""\n    def f(self):\n        b"""Says nothing at all."""\n',
        'x = """\ndef f():\n    no code\n"""\ndef g():\n    """Says what it does."""\n',
    ],
)  # fmt: skip
def test_unusual_sources_have_the_same_docstrings(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert docstrings(source.encode(), "package.module") == of_whole(source.encode(), monkeypatch) != []
