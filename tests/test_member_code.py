"""A key of the user's own code changes with what can change a result, with nothing else, and is the same in every process."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import mlmclm
from mlmclm.errors import UserError
from mlmclm.member_code import OwnCode, own_code
from mlmclm.registry import KINDS

PACKAGE = {
    "mine/__init__.py": """
        VERSION = 1
        from .exported import passed_on
        """,
    "mine/exported.py": """
        def passed_on(x):
            return x + 1
        """,
    "mine/base.py": """
        import functools

        def noted(function):
            @functools.wraps(function)
            def call(*given):
                return function(*given)
            return call

        class Base:
            def scale(self):
                return 1
        """,
    "mine/top.py": """
        FACTOR = 1.0
        TABLE = {}
        TABLE["a"] = 1
        UNUSED = 1

        def scaled(x):
            return FACTOR * x

        def with_table(x):
            return TABLE["a"] * x

        def unused(x):
            __import__("os")
            return x
        """,
    "mine/inside.py": "FACTOR = 1.0\n",
    "mine/dotted.py": "FACTOR = 1.0\n",
    "mine/named.py": "FACTOR = 1.0\n",
    "mine/computed.py": "FACTOR = 1.0\n",
    "mine/starred.py": "SPREAD = 1.0\nOTHER = 2\n",
    "mine/fallback.py": "def fast(x):\n    return x\n",
    "mine/for_types.py": "class Array: pass\n",
    "mine/patches.py": "import types\nHOLDER = types.SimpleNamespace()\nHOLDER.value = 1\n",
    "mine/apart/__init__.py": "SHARE = 1\n",
    "mine/apart/deep.py": "DEPTH = 1\n",
    "mine/member.py": '''
        """A member."""
        from __future__ import annotations

        import functools
        from dataclasses import dataclass
        from typing import TYPE_CHECKING

        import mine.patches
        from mine import passed_on
        from .apart import deep
        from .base import Base, noted
        from .starred import *
        from .top import scaled, with_table as tabled, unused

        if TYPE_CHECKING:
            from .for_types import Array

        try:
            from .fallback import fast
        except ImportError:
            fast = abs

        CONSTANT = 3
        # A comment at the top.
        double = lambda x: 2 * x
        thirds = functools.partial(pow, 3)
        LEFT = 1

        @dataclass
        class Settings:
            power: float = 1.0

        def beside(x):
            return eval("x")

        def outer(x):
            def inner(y):
                from .inside import FACTOR
                return FACTOR * y
            return inner(x)

        class Member(Base):
            """Says something."""
            kept = CONSTANT
            settings = Settings()

            def value(self, x: Array, more=CONSTANT):
                # A comment inside.
                import importlib
                import mine.dotted
                import mine.named as named
                found = importlib.import_module("mine.computed")
                return outer(x) + mine.dotted.FACTOR + named.FACTOR + found.FACTOR + SPREAD + deep.DEPTH + passed_on(x)

            @noted
            def other(self, x):
                return double(x) + thirds(x) + scaled(x) + tabled(x) + fast(x)

        class Beside(Base):
            pass
        ''',
}

EDITS = {
    "a helper at the top": ("mine/top.py", "return FACTOR * x", "return FACTOR + x", True),
    "a constant of a helper": ("mine/top.py", "FACTOR = 1.0", "FACTOR = 2.0", True),
    "a helper under another name": ("mine/top.py", 'return TABLE["a"] * x', 'return TABLE["a"]', True),
    "an item that is set": ("mine/top.py", 'TABLE["a"] = 1', 'TABLE["a"] = 2', True),
    "a relative import in a function in a function": ("mine/inside.py", "1.0", "2.0", True),
    "an import of a dotted name in a method": ("mine/dotted.py", "1.0", "2.0", True),
    "an import under another name in a method": ("mine/named.py", "1.0", "2.0", True),
    "import_module with a name": ("mine/computed.py", "1.0", "2.0", True),
    "a package's own import": ("mine/exported.py", "x + 1", "x + 2", True),
    "what another package's import does": ("mine/patches.py", "HOLDER.value = 1", "HOLDER.value = 2", True),
    "a star import": ("mine/starred.py", "SPREAD = 1.0", "SPREAD = 2.0", True),
    "a module of a package": ("mine/apart/deep.py", "DEPTH = 1", "DEPTH = 2", True),
    "an import in a try": ("mine/fallback.py", "return x", "return -x", True),
    "a decorator's own code": ("mine/base.py", "return function(*given)", "return -function(*given)", True),
    "the use of a decorator": ("mine/member.py", "@noted\n    def", "def", True),
    "a method of a base class": ("mine/base.py", "return 1", "return 2", True),
    "the base class": ("mine/member.py", "class Member(Base)", "class Member", True),
    "a constant": ("mine/member.py", "CONSTANT = 3", "CONSTANT = 4", True),
    "a default": ("mine/member.py", "more=CONSTANT", "more=2", True),
    "a field's default": ("mine/member.py", "power: float = 1.0", "power: float = 2.0", True),
    "a lambda": ("mine/member.py", "lambda x: 2 * x", "lambda x: 3 * x", True),
    "a partial function": ("mine/member.py", "partial(pow, 3)", "partial(pow, 4)", True),
    "a comment inside what is used": ("mine/member.py", "# A comment inside.", "# Another.", True),
    "a docstring of what is used": ("mine/member.py", "Says something.", "Says another thing.", True),
    "a comment outside": ("mine/member.py", "# A comment at the top.", "# Another.\n# One more.\n", False),
    "a module's docstring": ("mine/member.py", '"""A member."""', '"""One."""', False),
    "an unused name": ("mine/member.py", "LEFT = 1", "LEFT = 2", False),
    "an unused function": ("mine/member.py", 'return eval("x")', "return x", False),
    "an unused class": ("mine/member.py", "class Beside(Base):\n    pass", "class Beside:\n    pass", False),
    "an unused function of a helper": ("mine/top.py", '__import__("os")', "pass", False),
    "an unused name of a helper": ("mine/top.py", "UNUSED = 1", "UNUSED = 2", False),
    "an unused name of a package": ("mine/__init__.py", "VERSION = 1", "VERSION = 2", False),
    "an unused name of a star import": ("mine/starred.py", "OTHER = 2", "OTHER = 3", False),
    "an unused import": ("mine/member.py", ", unused\n", "\n", False),
    "an import for type checking": ("mine/for_types.py", "pass", "x = 1", False),
}


PACKAGE = {name: textwrap.dedent(text).lstrip("\n") for name, text in PACKAGE.items()}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OwnCode]]:
    """Writes a package over the last one, imports a member of it anew, and returns its code."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "renamed")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def code(
        files: Mapping[str, str], member: str = "mine.member:Member", folder: str = "here", *, first: str = ""
    ) -> OwnCode:
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(write(tmp_path / folder, files))
            patch.setattr(sys, "dont_write_bytecode", True)
            forget()
            if first:
                importlib.import_module(first)
            module, _, name = member.partition(":")
            return own_code(getattr(importlib.import_module(module), name))

    yield code
    forget()


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_the_key_where_it_can_change_a_result(load: Callable[..., OwnCode], edit: str) -> None:
    name, old, new, changes = EDITS[edit]
    before, text = load(PACKAGE).hash, PACKAGE[name]
    assert old in text
    assert (load({**PACKAGE, name: text.replace(old, new)}).hash != before) == changes
    assert load(PACKAGE).hash == before


def test_the_key_says_neither_where_the_code_is_nor_what_is_loaded(
    load: Callable[..., OwnCode], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = load(PACKAGE)
    assert {"mine.inside", "mine.dotted", "mine.computed", "mine.apart.deep", "mine.patches"} <= found.modules.keys()
    assert load(PACKAGE, first="mine.inside").hash == load(PACKAGE, first="mine.dotted").hash == found.hash
    monkeypatch.chdir(tmp_path)
    assert load(PACKAGE, folder="elsewhere").hash == found.hash
    renamed = {name: text for name, text in PACKAGE.items() if name != "mine/member.py"}
    assert load({**renamed, "mine/renamed.py": PACKAGE["mine/member.py"]}, "mine.renamed:Member").hash == found.hash
