"""A key of the user's own code changes with all that it imports, with nothing else, and is the same in every process."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from mlmclm import own_modules
from mlmclm.member_code import OwnCode, own_code

FILES = {
    "mine/__init__.py": """
        from .exported import passed_on
        """,
    "mine/exported.py": "def passed_on(x):\n    return x + 1\n",
    "mine/base.py": """
        import functools

        KINDS = []

        def noted(function):
            @functools.wraps(function)
            def call(*given):
                return function(*given)
            return call

        class Base:
            def __init_subclass__(cls):
                KINDS.append(cls)

            def scale(self):
                return 1
        """,
    "mine/top.py": """
        HOUR = 60 * 60
        FACTOR = 1.0
        TABLE = {"a": [1, 2]}
        NAMES = {"a", "b"}
        LIST = [1]
        LIST += [2]
        _warned = False
        _cache = {}
        counts = {"calls": 0}

        def stepped(x, step=1, *, _kept={}):
            _kept[x] = step
            return x

        FUNCTIONS = {"a": stepped}

        def scaled(x):
            global _warned
            _warned = True
            counts["calls"] += 1
            return _cache.setdefault(x, FACTOR * x)

        class Config:
            rate = 1
            calls = 0

            def used(self):
                type(self).calls += 1
                return self.rate
        """,
    "mine/star.py": "from .starred import *\n",
    "mine/starred.py": "__all__ = ['SPREAD', 'REST']\nSPREAD = REST = 1.0\n",
    "mine/listed/__init__.py": "__all__ = ['below']\n",
    "mine/listed/below.py": "DEPTH = 1\n",
    "mine/deep/__init__.py": "",
    "mine/deep/er/__init__.py": "from . import est\n",
    "mine/deep/er/est.py": "DEPTH = 1\n",
    "mine/plugin.py": "from .base import Base\n\nclass Plugin(Base):\n    share = 1\n",
    "mine/inside.py": "FACTOR = 1.0\n",
    "mine/dotted.py": "FACTOR = 1.0\n",
    "mine/computed.py": "FACTOR = 1.0\n",
    "mine/late/__init__.py": """
        def __getattr__(name):
            import importlib
            return importlib.import_module(".later", __name__).FACTOR
        """,
    "mine/late/later.py": "FACTOR = 1.0\n",
    "mine/fallback.py": "def fast(x):\n    return x\n",
    "mine/in_class.py": "FACTOR = 1.0\n",
    "mine/for_types.py": "class Array: pass\n",
    "mine/unused.py": "FACTOR = 1.0\n",
    "apart/near.py": "FACTOR = 1.0\n",
    "queue.py": "FACTOR = 1.0\n",
    "statistics_of.py": "FACTOR = 1.0\n",
    "mine/member.py": '''
        """A member."""
        from __future__ import annotations

        import math
        import os
        import re
        from dataclasses import dataclass, field
        from functools import lru_cache, partial
        from math import sqrt
        from typing import TYPE_CHECKING

        import apart.near
        import mine.deep.er
        import mine.plugin
        from mine import passed_on
        from .base import KINDS, Base, noted
        from .late import sooner
        from .listed import *
        from .star import *
        from . import top
        from .top import FACTOR, TABLE, Config, scaled as tripled

        if TYPE_CHECKING:
            from .for_types import Array

        try:
            from .fallback import fast
        except ImportError:
            fast = abs
        try:
            import absent_package
        except ImportError:
            absent_package = None

        CONSTANT = 3
        FLAG = True
        # A comment at the top.
        double = lambda x: 2 * x
        thirds = partial(pow, 3)
        if FLAG:
            from statistics_of import FACTOR as CHOSEN
        else:
            CHOSEN = 2

        @dataclass(slots=True)
        class Settings:
            power: float = 1.0
            parts: list = field(default_factory=list)

        @lru_cache
        def kept(x):
            return re.compile(x)

        class Member(Base):
            from .in_class import FACTOR as own
            constant = CONSTANT
            __hidden = 1

            def value(self, x: Array, more=CONSTANT):
                """Says something."""
                # A comment inside.
                import importlib
                import mine.dotted
                found = importlib.import_module("mine.computed")
                def inner(y):
                    from .inside import FACTOR
                    return FACTOR * y
                return inner(x) + mine.deep.er.est.DEPTH + found.FACTOR

            @noted
            def other(self, x):
                return double(x)

            @property
            def shown(self):
                return self.model.eval()

            @staticmethod
            def of(x):
                return x

            def __apart(self):
                return 1

        if __name__ == "__main__":
            SCRIPT = 1
        else:
            SCRIPT = 2
        ''',
}
FILES = {name: textwrap.dedent(text).lstrip("\n") for name, text in FILES.items()}

EDITS = {
    "a constant of a helper": ("mine/top.py", "FACTOR = 1.0", "FACTOR = 2.0"),
    "a list that is added to": ("mine/top.py", "LIST += [2]", "LIST += [3]"),
    "the order of statements": ("mine/top.py", "HOUR = 60 * 60\nFACTOR = 1.0", "FACTOR = 1.0\nHOUR = 60 * 60"),
    "a relative import in a function in a function": ("mine/inside.py", "1.0", "2.0"),
    "an import of a dotted name in a method": ("mine/dotted.py", "1.0", "2.0"),
    "import_module with a name": ("mine/computed.py", "1.0", "2.0"),
    "import_module relative to its package": ("mine/late/later.py", "1.0", "2.0"),
    "an import in the body of a class": ("mine/in_class.py", "1.0", "2.0"),
    "a package's own import": ("mine/exported.py", "x + 1", "x + 2"),
    "a package that a module is in": ("mine/deep/__init__.py", "", "import os\n"),
    "a module of a package that another one imports": ("mine/deep/er/est.py", "DEPTH = 1", "DEPTH = 2"),
    "a module of a folder without __init__": ("apart/near.py", "1.0", "2.0"),
    "a star import": ("mine/starred.py", "SPREAD = REST = 1.0", "SPREAD = REST = 2.0"),
    "a star import of a star import": ("mine/star.py", "import *", "import SPREAD"),
    "a module that __all__ names": ("mine/listed/below.py", "DEPTH = 1", "DEPTH = 2"),
    "what runs when a class is made": ("mine/base.py", "KINDS.append(cls)", "KINDS.insert(0, cls)"),
    "__all__": ("mine/starred.py", "['SPREAD', 'REST']", "['SPREAD']"),
    "a plugin that adds itself by __init_subclass__": ("mine/plugin.py", "share = 1", "share = 2"),
    "an import in a try": ("mine/fallback.py", "return x", "return -x"),
    "a flag that chooses an import": ("mine/member.py", "FLAG = True", "FLAG = False"),
    "a module that a flag chooses": ("statistics_of.py", "1.0", "2.0"),
    "a decorator's own code": ("mine/base.py", "return function(*given)", "return -function(*given)"),
    "the use of a decorator": ("mine/member.py", "@noted\n    def", "def"),
    "a method of a base class": ("mine/base.py", "return 1", "return 2"),
    "a default": ("mine/member.py", "more=CONSTANT", "more=2"),
    "a field's default": ("mine/member.py", "power: float = 1.0", "power: float = 2.0"),
    "what runs where the module is imported": ("mine/member.py", "SCRIPT = 2", "SCRIPT = 3"),
    "a package that it imports": ("mine/member.py", "import math\n", "import math, pytest\n"),
}
KEEPS = {
    "a comment": ("mine/member.py", "# A comment inside.", "# Another.\n        # One more."),
    "layout": ("mine/top.py", '{"a": [1, 2]}', '{\n    "a": [1, 2],\n}'),
    "a module that it doesn't import": ("mine/unused.py", "1.0", "2.0"),
    "a file with a name of one that Python has": ("queue.py", "1.0", "2.0"),
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "apart", "statistics_of")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    own_modules._TEXTS.fixed.clear()


Load = Callable[..., OwnCode]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Writes a package over the last one, imports a member of it anew, and returns its code."""

    def code(
        files: Mapping[str, str], member: str = "mine.member:Member", folder: str = "here", first: str = ""
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


def edited(name: str, old: str, new: str) -> dict[str, str]:
    assert old in FILES[name]
    return FILES | {name: FILES[name].replace(old, new) if old else new}


@pytest.mark.parametrize("edit", [*EDITS, *KEEPS])
def test_an_edit_of_what_a_member_imports_changes_its_key_and_no_other_does(load: Load, edit: str) -> None:
    before = load(FILES).hash
    assert (load(edited(*{**EDITS, **KEEPS}[edit])).hash != before) == (edit in EDITS)
    assert load(FILES).hash == before


def test_the_key_says_neither_where_the_code_is_nor_what_is_loaded(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = load(FILES)
    used = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in FILES}
    assert found.modules.keys() == used - {"mine.unused", "queue"}
    assert load(FILES, first="mine.inside").hash == load(FILES, first="mine.dotted").hash == found.hash
    monkeypatch.chdir(tmp_path)
    assert load(FILES, folder="elsewhere").hash == found.hash
    renamed = {name: text for name, text in FILES.items() if name != "mine/member.py"}
    assert load({**renamed, "mine/renamed.py": FILES["mine/member.py"]}, "mine.renamed:Member").hash == found.hash
    assert load(FILES, "mine.member:Settings").hash != found.hash


REFUSED = {
    "importlib.import_module(self.name)": "import_module",
    "importlib.import_module('.computed', package=self.name)": "import_module",
    "importlib.import_module(package='mine', name=self.name)": "import_module",
    "importlib.import_module('.absent', 'mine')": r"line \d+ imports mine\.absent, which cannot be found",
    "load = importlib.import_module": "import_module",
    "from importlib import import_module as load": "importlib.import_module",
    "importlib.__import__('x')": "__import__",
    "__import__('x')": "__import__",
    "exec('x')": "exec",
    "eval('x')": "eval",
    "run = eval": "eval",
    "import builtins": "builtins",
    "from builtins import eval as run": "builtins",
    "__builtins__['eval']": "__builtins__",
    "import sys; sys.modules['x']": "sys.modules",
    "from sys import modules": "sys.modules",
    "import sys as system; system.modules['x']": r"line \d+ uses sys as system, which can run code",
    "import pkgutil; pkgutil.resolve_name('x:y')": "resolve_name",
    "from pkgutil import resolve_name as find": "pkgutil.resolve_name",
    "import pydoc; pydoc.locate('x')": "pydoc",
    "from pydoc import locate": "pydoc",
    "import runpy": "runpy",
    "importlib.util.spec_from_file_location('x', 'x')": "spec_from_file_location",
    "importlib.metadata.entry_points(group='x')": "entry_points",
    "Base.__subclasses__()": "__subclasses__",
    "import compiled": r"the module compiled .*has no source in Python: install it",
    "import broken": r"broken\.py, line 1: ",
    "import absent_module": r"line \d+ imports absent_module, which cannot be found",
    "from .absent import x": r"line \d+ imports mine\.absent, which cannot be found",
    "import apart.absent": r"line \d+ imports apart\.absent, which cannot be found",
    "import __main__": r"line \d+ imports __main__: move what it uses there",
}


@pytest.mark.parametrize("line", REFUSED)
def test_code_that_a_source_does_not_name_is_refused(load: Load, line: str) -> None:
    files = {"compiled.so": "", "broken.py": "def f(:\n"} | edited("mine/member.py", "import mine.dotted", line)
    said = REFUSED[line] if " " in REFUSED[line] else rf"member\.py, line \d+ uses {REFUSED[line]}, which can run code"
    with pytest.raises(ValueError, match=said):
        load(files)


@pytest.mark.parametrize(
    "names", ["['be' + 'low']", "[name for name in ('below',)]", "sorted({'below'})", "[f'{\"below\"}']"]
)
def test_a_star_import_of_computed_names_is_refused(load: Load, names: str) -> None:
    said = r"listed.__init__\.py: .*member\.py imports \* from it, and its __all__ is computed"
    with pytest.raises(ValueError, match=said):
        load(edited("mine/listed/__init__.py", "['below']", names))
    for listed in ("('below',)", "['below']; __all__ += ['below']; __all__.append('below')"):
        assert "mine.listed.below" in load(edited("mine/listed/__init__.py", "['below']", listed)).modules


ACCEPTED = (
    "import importlib.resources; from importlib import import_module; import_module('mine.computed')",
    "importlib.import_module('.computed', package='mine'), importlib.import_module(package='mine', name='.computed')",
    "self.model.eval(); self.frame.eval('x'); re.compile('x'); self.model.compile(); self.engine.exec('x')",
    "import sys; sys.argv, sys.path, self.model.modules()",
    "self.resolve_name('x'); split = 'eval'",
    "if x:\n            import absent_module",
    "try:\n            from .helper import x\n        except ImportError:\n            from helper import x",
    "from contextlib import suppress\n        with suppress(ImportError):\n            import absent_module",
    "from xml.etree import ElementTree; import os.path as places; import collections.abc; import numpy as np",
    "x = 1" + "\n        if x == 1: pass" + "\n        elif x == 2: pass" * 300,
)


@pytest.mark.parametrize("line", ACCEPTED)
def test_ordinary_code_is_accepted(load: Load, line: str) -> None:
    code = load(edited("mine/member.py", "import mine.dotted", line))
    code.check(sys.modules["mine.member"].Member)


def test_the_variables_of_a_comprehension_are_no_names_of_its_module(load: Load) -> None:
    """They passed for names that the module had lost since it was loaded."""
    lines = "FACTOR = 1.0\nPAIRS = [(one, other) for one in 'ab' for other in 'cd' if (last := one)]"
    code = load(edited("mine/top.py", "FACTOR = 1.0", lines))
    code.check(sys.modules["mine.member"].Member)


CHANGES = {
    "a number": "top.FACTOR = 2.0",
    "a value of a dictionary": "top.TABLE['a'].append(3)",
    "an item of a set": "top.NAMES.add('c')",
    "a copy by a from-import": "member.FACTOR = 2.0",
    "a module": "import types; member.top = types.SimpleNamespace()",
    "a function": "top.scaled = lambda x: x",
    "a function by another one": "base.noted = top.scaled",
    "a function by one of Python's": "import math; top.scaled = math.sqrt",
    "an imported function by another one": "member.tripled = base.noted",
    "a function that is run in the module": "exec('def stepped(x, step=1):\\n    return 3', vars(top))",
    "the code of a function": "top.scaled.__code__ = (lambda x: x).__code__",
    "a class": "top.Config = type('Config', (), {})",
    "a class that another module names by its module": "import mine; mine.plugin.Plugin = type('Plugin', (), {})",
    "a constructor": "member.Settings.__init__ = lambda self: None",
    "a method": "top.Config.used = lambda self: 2",
    "a static method of the member": "member.Member.of = staticmethod(lambda x: -x)",
    "a number of another class": "top.Config.rate = 2",
    "a number that is computed": "top.HOUR = 7",
    "an item of a list that is computed": "top.LIST.append(3)",
    "an object": "member.thirds = member.partial(pow, 2)",
    "an attribute of the member": "member.Member.constant = 4",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_other_code_has_changed_in_this_process_is_refused(load: Load, change: str) -> None:
    code = load(FILES)
    modules = {name: importlib.import_module(f"mine.{name}") for name in ("member", "top", "base")}
    member = modules["member"].Member
    code.check(member)
    exec(CHANGES[change], {"__name__": "__main__", **modules})
    with pytest.raises(ValueError, match=r"is .* here, and|isn't what its source says|has been set|has changed since"):
        code.check(member)
    if "attribute" not in change:
        with pytest.raises(ValueError, match=r"is .* here, and|isn't what its source says|has changed since"):
            own_code(member)


def test_counters_caches_and_what_libraries_do_to_a_class_change_no_key(load: Load) -> None:
    descent = "import torch\nclass Descent(torch.optim.SGD):\n    def step(self, closure=None):\n        return 1\n"
    code = load(FILES | {"mine/member.py": FILES["mine/member.py"] + descent})
    member, top, torch = (importlib.import_module(name) for name in ("mine.member", "mine.top", "torch"))
    for _ in range(2):
        member.Member().value(1)
        top.stepped(top.scaled(2))
        top.Config().used()
        member.kept("x")
        member.Descent([torch.nn.Parameter(torch.ones(1))], lr=1.0).step()
        code.check(member.Member)
        assert own_code(member.Member).hash == code.hash
    assert top._warned and top.counts["calls"] == 2 and "hooked" in vars(member.Descent.step)


EDITED = {
    "a helper that it imports": ("mine/top.py", "return _cache", "return -_cache"),
    "a constant": ("mine/top.py", "FACTOR = 1.0", "FACTOR = 2.0"),
    "a value that is computed": ("mine/top.py", "LIST += [2]", "LIST += [3]"),
    "its own module": ("mine/member.py", "return 1", "return 2"),
    "a name that is new": ("mine/exported.py", "def passed_on", "def more(x):\n    return x\n\ndef passed_on"),
}


@pytest.mark.parametrize("edit", EDITED)
def test_a_module_that_was_edited_after_it_was_loaded_is_refused_until_all_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    name, old, new = EDITED[edit]
    forget()
    monkeypatch.syspath_prepend(write(tmp_path, FILES))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before, member = own_code(importlib.import_module("mine.member").Member).hash, sys.modules["mine.member"]
    (tmp_path / name).write_text("# Edited, which makes no difference.\n" + FILES[name])
    assert own_code(member.Member).hash == before
    (tmp_path / name).write_text(edited(name, old, new)[name] + "\n")
    with pytest.raises(ValueError, match=r"has changed since it was loaded|here, and"):
        own_code(member.Member)
    importlib.reload(sys.modules[name.removesuffix(".py").replace("/", ".")])
    if name == "mine/top.py":
        with pytest.raises(ValueError, match=r"isn't what its source says|has changed since it was loaded"):
            own_code(member.Member)
    importlib.reload(sys.modules["mine"])
    assert own_code(importlib.reload(member).Member).hash != before
    forget()


def test_a_module_that_only_a_function_loads_is_loaded_as_it_was_until_it_is_registered_or_loaded_anew(
    load: Load, tmp_path: Path
) -> None:
    code = load(FILES)
    member, file = sys.modules["mine.member"].Member, tmp_path / "here/mine/inside.py"
    assert "mine.inside" not in sys.modules
    file.write_text("FACTOR = 7.0\n")
    edited = own_code(member)
    assert edited.hash != code.hash
    file.write_text("FACTOR = 5.0\n")
    member().value(1)
    assert sys.modules["mine.inside"].FACTOR == 7.0
    edited.check(member)
    with pytest.raises(ValueError, match=r"inside\.py has been loaded again since it was registered"):
        code.check(member)
    assert importlib.reload(sys.modules["mine.inside"]).FACTOR == 5.0
    with pytest.raises(ValueError, match=r"inside\.py has been loaded again since it was registered"):
        edited.check(member)


def test_the_text_of_a_key_is_run_and_not_the_bytecode_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both texts have one size and one time, by which Python takes the bytecode for that of the newer one."""
    file = tmp_path / "aged.py"
    for text in ("FACTOR = 1.0\n", "FACTOR = 0.5\n"):
        file.write_text(text)
        os.utime(file, (1_700_000_000, 1_700_000_000))
        if "1.0" in text:
            py_compile.compile(str(file), doraise=True)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("aged")
    monkeypatch.delitem(sys.modules, "aged")
    assert module.FACTOR == 0.5


def test_modules_in_a_zip_file_and_with_names_of_python_s_own_count(tmp_path: Path) -> None:
    program = """
        import sys; sys.path[:0] = [{place!r}]
        import member
        from mlmclm.member_code import own_code
        code = own_code(member.Member)
        code.check(member.Member)
        print(code.hash, *sorted(code.modules))
        """
    found = []
    for number in (1, 2):
        files = {"member.py": "import this\nclass Member: pass\n", "this.py": f"FACTOR = {number}\n"}
        folder = write(tmp_path / str(number), files)
        with zipfile.ZipFile(archive := tmp_path / f"{number}.zip", "w") as file:
            for name in files:
                file.write(folder / name, name)
        for place in (folder, archive):
            found.append(run(textwrap.dedent(program).format(place=str(place)), tmp_path).split())
    assert found[0] == found[1] and found[2] == found[3] and found[0][0] != found[2][0]
    assert found[0][1:] == ["member", "this"]


def run(program: str, folder: Path, seed: int = 0) -> str:
    """Return what a program writes that is run as a script, in a process of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(program)
    done = subprocess.run([sys.executable, folder / "script.py"], env=os.environ | {"PYTHONHASHSEED": str(seed)}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


MAIN = {
    "a number": ("VALUENN = 1", "= 1", "= 2"),
    "a function": ("def VALUENN(x):\n    return x + 1", "x + 1", "x + 2"),
    "a function of a function": ("def fNN(x):\n    return x + 1\ndef VALUENN(x):\n    return fNN(x)", "x + 1", "x + 2"),
    "a lambda": ("VALUENN = lambda x: x + 1", "x + 1", "x + 2"),
    "a default": ("STEPNN = 1\ndef VALUENN(x, step=STEPNN):\n    return x", "STEPNN = 1", "STEPNN = 2"),
    "a decorator": ("def decNN(f):\n    return lambda x: 1\n@decNN\ndef VALUENN(x):\n    return x", "x: 1", "x: 2"),
    "a closure": (
        "def makeNN(k):\n    def made(x):\n        return k\n    return made\nVALUENN = makeNN(1)",
        "(1)",
        "(2)",
    ),
    "functions in a dictionary": ("def fNN(x):\n    return x + 1\nVALUENN = {'f': [fNN]}", "x + 1", "x + 2"),
    "a partial": ("def fNN(x, y):\n    return x + y\nVALUENN = partial(fNN, 1)", "x + y", "x - y"),
    "what a partial holds": ("VALUENN = partial(pow, 1)", "1", "2"),
    "a cached function": ("@lru_cache\ndef VALUENN(x):\n    return x + 1", "x + 1", "x + 2"),
    "a method of an object": (
        "class KNN:\n    def f(self, x):\n        return x + 1\nVALUENN = KNN().f",
        "x + 1",
        "x + 2",
    ),
    "an object's state": (
        "class KNN:\n    def __init__(self, k):\n        self.k = k\nVALUENN = KNN(1)",
        "KNN(1)",
        "KNN(2)",
    ),
    "an object with slots": ("class KNN:\n    __slots__ = ('k',)\nVALUENN = KNN(); VALUENN.k = 1", "k = 1", "k = 2"),
    "a dataclass": ("@dataclass\nclass KNN:\n    k: int = 1\nVALUENN = KNN()", "= 1", "= 2"),
    "a dataclass with slots": ("@dataclass(slots=True)\nclass VALUENN:\n    k: int = 1", "= 1", "= 2"),
    "a class with annotations": ("class VALUENN:\n    k: int = 1", "= 1", "= 2"),
    "a class": ("class VALUENN:\n    k = 1", "k = 1", "k = 2"),
    "an attribute that is set": ("class VALUENN:\n    k = 1\nVALUENN.k = 2", "k = 2", "k = 3"),
    "a method that is set": (
        "class VALUENN:\n    def f(self):\n        pass\nVALUENN.f = lambda self: 1",
        "self: 1",
        "self: 2",
    ),
    "a base class": ("class BNN:\n    k = 1\nclass VALUENN(BNN):\n    pass", "k = 1", "k = 2"),
    "an enumeration": ("class KNN(Enum):\n    A = 1\nVALUENN = KNN.A", "A = 1", "A = 2"),
    "a named tuple": ("KNN = namedtuple('KNN', 'a b')\nVALUENN = KNN(1, 2)", "(1, 2)", "(1, 3)"),
    "a table that fills an attribute of its name": (
        "TNN = [1]\ndef VALUENN(box):\n    box.TNN = {}\n    box.TNN[0] = TNN[0]\n    return box",
        "[1]",
        "[2]",
    ),
    "a table with the name of another function's variable": (
        "TNN = [1]\nclass VALUENN:\n    def f(self):\n        return TNN[0]\n    def g(self):\n        TNN = {}\n        TNN[0] = 1",
        "[1]",
        "[2]",
    ),
    "nested lists": ("VALUENN = [(1, 2), (3,)]", "(1, 2), (3,)", "(1,), (2, 3)"),
    "itself": ("VALUENN = [1]\nVALUENN[:] = [VALUENN, 1]", ", 1]", ", 2]"),
    "a set of texts": ("VALUENN = {'a', 'b', 'c', ('d', 'e')}", "'c'", "'f'"),
    "a set of functions": ("VALUENN = {len, sum, min, print}", "print", "max"),
    "a set in a namespace": ("VALUENN = SimpleNamespace(a={'a', 'b', 'c'})", "'c'", "'d'"),
    "a set in a dictionary with defaults": ("VALUENN = defaultdict(set, a={'a', 'b', 'c'})", "'c'", "'d'"),
    "an ordered dictionary": ("def fNN(x):\n    return x + 1\nVALUENN = OrderedDict(f=fNN)", "x + 1", "x + 2"),
    "np.vectorize": ("def fNN(x):\n    return x + 1\nVALUENN = np.vectorize(fNN)", "x + 1", "x + 2"),
    "singledispatch": (
        "@singledispatch\ndef VALUENN(x):\n    return x\n@VALUENN.register\ndef _(x: int):\n    return x + 1",
        "x + 1",
        "x + 2",
    ),
    "an array": ("VALUENN = np.arange(3)", "3", "4"),
    "an array's type": ("VALUENN = np.zeros(3, 'f4')", "f4", "i4"),
    "a tensor": ("VALUENN = torch.ones(3)", "3", "4"),
    "a tensor's type": ("VALUENN = torch.ones(3, dtype=torch.bfloat16)", "torch.bfloat16", "torch.float16"),
    "a module with weights": (
        "VALUENN = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(torch.ones(2, 2)))",
        "ones",
        "zeros",
    ),
    "a module with functions": (
        "class KNN(torch.nn.Module):\n    def forward(self, x):\n        return x\nVALUENN = torch.nn.Sequential(KNN())",
        "return x",
        "return -x",
    ),
    "a function without gradients": ("@torch.no_grad()\ndef VALUENN(x):\n    return x + 1", "x + 1", "x + 2"),
    "an optimiser": (
        "class VALUENN(torch.optim.SGD):\n    def step(self, closure=None):\n        return 1\nVALUENN([torch.nn.Parameter(torch.ones(1))], lr=1.0)",
        "return 1",
        "return 2",
    ),
    "a pattern, a path, a number type": ("VALUENN = [re.compile('a'), Path('b'), torch.float32]", "'a'", "'c'"),
    "a module of one's own": ("import helping.inside as VALUENN", "helping.inside", "helping.other"),
    "an import in a function": (
        "def VALUENN():\n    from helping import inside\n    return inside",
        "inside\n    return inside",
        "other\n    return other",
    ),
    "a value of a module": ("from helping.inside import FACTOR as VALUENN", "FACTOR", "OTHER"),
    "a function of a module": ("from helping.inside import one as VALUENN", "import one", "import two"),
}
PREAMBLE = """
import re, sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial, singledispatch
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from mlmclm.member_code import own_code
UNUSED = 1
"""
MEMBER = """
class MemberNN:
    def value(self, x):
        return VALUENN
try:
    CODE = own_code(MemberNN)
    CODE.check(MemberNN)
    print(CODE.hash)
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def in_main(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Keys of members of a script by what they use: twice, with other comments, and with all that they use changed."""
    folder = tmp_path_factory.mktemp("main")
    lines = "FACTOR, OTHER = 1, 2\ndef one(x):\n    return x\ndef two(x):\n    return x\n"
    write(folder, {"helping/__init__.py": "", "helping/inside.py": lines, "helping/other.py": ""})
    found = []
    for seed in (1, 2, 3):
        program = PREAMBLE if seed == 1 else PREAMBLE.replace("UNUSED = 1", "# A comment.\nUNUSED = 2\n")
        for number, (text, old, new) in enumerate(MAIN.values()):
            assert old in text
            program += f"{text.replace(old, new) if seed == 3 else text}\n{MEMBER}".replace("NN", str(number))
        found.append(dict(zip(MAIN, run(program, folder, seed).splitlines(), strict=True)))
    return found


@pytest.mark.parametrize("what", MAIN)
def test_a_member_of_a_script_has_a_key_of_its_definition_and_of_the_values_that_it_uses(
    in_main: list[dict[str, str]], what: str
) -> None:
    first, again, changed = (each[what] for each in in_main)
    assert len(first) == len(changed) == 16, (first, changed)
    assert first == again != changed


def test_a_script_s_values_that_no_key_can_say_are_refused(tmp_path: Path) -> None:
    values = ("open(__file__)", "(x for x in ())", "torch.ones(2).to_sparse()", "__import__('threading').Lock()")
    lines = [*(f"VALUENN = {each}" for each in values), "def VALUENN():\n    return globals()", "def VALUENN():\n    return eval('x')"]  # fmt: skip
    program = PREAMBLE + "".join(f"{line}\n{MEMBER}".replace("NN", str(n)) for n, line in enumerate(lines))
    *said, computed, evaluated = run(program, tmp_path).splitlines()
    assert all("of which no key can be made: move it into a module" in each for each in said) and len(said) == 4
    assert "looks up names of a notebook or script" in computed and "uses eval, which can run code" in evaluated


STALE = {
    "a function that it imported": ("from helping import f", "helping.py", "return k", "return -k"),
    "a class that it imported": ("from helping import K as f", "helping.py", "class K:", "class K:\n    more = 1\n"),
}


@pytest.mark.parametrize("what", STALE)
def test_a_script_that_runs_other_code_than_its_files_now_have_is_refused(tmp_path: Path, what: str) -> None:
    imported, file, old, new = STALE[what]
    write(tmp_path, {"helping.py": "def f(k):\n    return k\n\nclass K:\n    pass\n"})
    program = f"""
import importlib, pathlib
import helping
from mlmclm.member_code import own_code
def f(k):
    return k
{imported}
class Member:
    def value(self):
        return f(1)
own_code(Member)
place = pathlib.Path(__file__).with_name({file!r})
place.write_text(place.read_text().replace({old!r}, {new!r}, 1))
importlib.reload(helping)
try:
    own_code(Member)
except ValueError as error:
    print(error)
"""
    assert "isn't what its source says" in run(program, tmp_path)


FACTORY = """
    import functools

    def power(k):
        return k

    def made(k, apart=None):
        class Made:
            kept = k
            def value(self, x, more=k):
                return x ** power(k)
        Made.apart = apart
        return Made

    def one(x):
        return x

    def other(x):
        return -x

    Two, Three, Again = made(2), made(3), made(2)
    With, Without = made(2, one), made(2, other)
    called = functools.partial(one, 2)
    class Kept:
        def __init__(self, *given):
            self.given = {*given}
    kept, less, again = Kept("a", "b"), Kept("a"), Kept("b", "a")
    """


def test_what_a_factory_gave_a_class_is_in_its_key(load: Callable[..., OwnCode]) -> None:
    names = ("Two", "Three", "Again", "With", "Without", "called", "kept", "less", "again")
    files = {"mine/__init__.py": "", "mine/factory.py": textwrap.dedent(FACTORY)}
    found = {name: load(files, f"mine.factory:{name}").hash for name in names}
    assert found["Two"] == found["Again"] and found["kept"] == found["again"]
    assert len(set(found.values())) == len(names) - 2


KINDS_OF_KEYS = ("objective", "schedule", "optimizer", "callback", "backend", "family", "task", "generator", "metric")
MEMBERS = """
    import mlmclm
    import torch
    from mlmclm.backends.optimizers.optimizer import Optimizer
    from mlmclm.backends.reference import Reference
    from mlmclm.objectives.mlm import Masked
    from mlmclm.pretraining.callbacks.callback import Callback
    from mlmclm.results.measures import WeightedMean
    from mlmclm.schedules.decay import Decay
    from mlmclm.tasks.declaration import Task
    from mlmclm.tasks.declared_tasks import get_task
    from mlmclm.tasks.families.sequence_classification import SequenceClassification
    from mlmclm.tasks.metric import Metric

    def factor():
        from .helper import FACTOR
        return FACTOR

    class Own(Masked):
        name = "own"
        def label(self, tokens, draw):
            return factor() * tokens, tokens

    class Root(Decay):
        name = "own"
        def factor(self, left):
            return factor() * left

    class Descent(torch.optim.SGD):
        def step(self, closure=None):
            return factor()

    class Plain(Optimizer):
        name = "own"
        @classmethod
        def build(cls, groups, settings):
            return Descent(groups, lr=0.1)

    class Watching(Callback):
        everywhere = True
        def on_step_end(self, step):
            factor()

    class Faster(Reference):
        name = "own"
        def value(self):
            return factor()

    class Heads(SequenceClassification):
        name = "own"
        @classmethod
        def measures(cls, *given):
            return factor()

    class Declared(Task):
        def words(self):
            return factor()

    class Generated:
        def find(self, task, store):
            return factor()
        def build(self, task, store):
            return factor()

    class Scaled(Metric):
        name = title = "own"
        family = "sequence-classification"
        @classmethod
        def measure(cls, columns, classes):
            return WeightedMean(factor() * columns["correct"])

    def task():
        return Declared.model_validate(get_task("sst2").model_dump() | {"name": "own"})

    def register():
        members = {"objective": Own, "schedule": Root, "optimizer": Plain, "callback": Watching, "backend": Faster,
                   "family": Heads, "task": task(), "generator": Generated(), "metric": Scaled}
        for kind, member in members.items():
            mlmclm.register(kind, "own", member)
    """
PROGRAM = """
    import json, os, sys
    sys.path.insert(0, {folder!r})
    from mlmclm.errors import UserError
    from mlmclm.registry import KINDS
    if {loaded}:
        import mine.helper
    from mine import members
    def keyed(kind):
        try:
            return KINDS[kind].keyed("own")
        except UserError as error:
            return str(error)
    def keys():
        return {{kind: keyed(kind) for kind in {kinds}}}
    if __name__ == "__main__":
        members.register()
        before = keys()
        if "import_module" not in open(members.__file__).read():
            import torch
            members.Plain.build([torch.nn.Parameter(torch.ones(2))], None).step()  # torch wraps `step` then
            members.register()
        print(json.dumps([before, keys()]))
    """


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Keys of a member of each kind, before and after it is used, by what is different in a process of its own."""
    members = textwrap.dedent(MEMBERS)
    texts = {
        "nothing": ("FACTOR = 1.0\n", members, False),
        "its place, its working directory, and that the helper is loaded": ("FACTOR = 1.0\n", members, True),
        "the helper": ("FACTOR = 0.5\n", members, False),
        "a name that is computed": ("", members.replace("from .helper import FACTOR", "import importlib; importlib.import_module(FACTOR)"), False),
    }  # fmt: skip
    running = {}
    for name, (helper, text, loaded) in texts.items():
        folder = write(
            tmp_path_factory.mktemp("kinds"),
            {"mine/__init__.py": "", "mine/helper.py": helper, "mine/members.py": text},
        )
        (folder / "program.py").write_text(
            textwrap.dedent(PROGRAM).format(folder=str(folder), loaded=loaded, kinds=KINDS_OF_KEYS)
        )
        place = folder if loaded else folder.parent
        running[name] = subprocess.Popen(
            [sys.executable, folder / "program.py"], cwd=place, stdout=subprocess.PIPE, text=True
        )
    return {name: tuple(json.loads(process.communicate()[0])) for name, process in running.items()}  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS_OF_KEYS)
def test_a_member_of_each_kind_has_a_key_of_its_source_in_every_process(
    keys: dict[str, tuple[dict[str, str], dict[str, str]]], kind: str
) -> None:
    found = {name: {before[kind], after[kind]} for name, (before, after) in keys.items()}
    assert all(len(each) == 1 for each in found.values()), "using it changes no key"
    first, moved, changed, computed = (each.pop() for each in found.values())
    assert first == moved != changed and first.startswith("own@") and changed.startswith("own@")
    assert computed.startswith(f"{kind} 'own' from ") and "uses import_module, which can run code" in computed


SENT = {
    "mine/helper.py": "FACTOR = 3.0\n",
    "mine/root.py": """
from mlmclm.schedules.decay import Decay
from .helper import FACTOR as LOADED

class Root(Decay):
    name = "root"
    more = 0

    def factor(self, left):
        from . import late
        return LOADED * left + late.FACTOR + self.more
""",
    "mine/late.py": "FACTOR = 1.0\n",
}


@pytest.mark.parametrize("more", (0, 1))
def test_a_worker_imports_the_modules_of_a_member_as_they_were_and_refuses_what_a_program_has_set(
    tmp_path: Path, more: int
) -> None:
    send = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import mine.root, mlmclm
from ray import cloudpickle
from mlmclm.registry import KINDS, shipment
mine.root.Root.more = {more}
mlmclm.register("schedule", None, mine.root.Root)
sys.stdout.buffer.write(cloudpickle.dumps((shipment(), KINDS["schedule"].keyed("root"))))
"""
    write(tmp_path, SENT)  # without __init__.py
    sent = subprocess.run([sys.executable, "-c", send], capture_output=True, check=True).stdout
    shutil.rmtree(tmp_path / "mine")
    receive = """
import sys
from ray import cloudpickle
from mlmclm.registry import KINDS
_, keyed = cloudpickle.loads(sys.stdin.buffer.read())
try:
    print(KINDS["schedule"]["root"]().factor(2.0), KINDS["schedule"].keyed("root") == keyed)
except Exception as error:
    print(error)
"""
    received = subprocess.run([sys.executable, "-c", receive], input=sent, capture_output=True, check=True).stdout
    assert (b"is other code in a worker than where it was registered" if more else b"7.0 True") in received


def test_a_worker_loads_the_entry_point_of_an_editable_package_from_the_texts_of_its_key(tmp_path: Path) -> None:
    info = {"METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n"}
    info["entry_points.txt"] = "[mlmclm.schedules]\nroot = mine.root:Root\n"
    write(tmp_path / "site-packages" / "mine-1.0.dist-info", info)
    places = f"import sys; sys.path[:0] = {[str(tmp_path / name) for name in ('site-packages', 'src')]}\n"
    keyed = (
        "from ray import cloudpickle\nfrom mlmclm.registry import KINDS, shipment\nkeyed = KINDS['schedule'].keyed\n"
    )
    send = "root = keyed('root')\nsys.stdout.buffer.write(cloudpickle.dumps((shipment(), root)))"
    receive = "_, root = cloudpickle.loads(sys.stdin.buffer.read())\nprint(KINDS['schedule']['root']().factor(2.0), keyed('root') == root)"
    write(tmp_path / "src", SENT)
    sent = subprocess.run([sys.executable, "-c", places + keyed + send], capture_output=True, check=True).stdout
    for edit in ("", "FACTOR = 5.0\n"):
        write(tmp_path / "src", {"mine/helper.py": edit, "mine/late.py": edit})
        received = subprocess.run([sys.executable, "-c", places + keyed + receive], input=sent, capture_output=True)
        assert received.stdout == b"7.0 True\n", received.stderr


def test_a_class_attribute_that_a_program_sets_is_in_the_key_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scaled_by.py").write_text(
        "class Scaled:\n    factor = 1.0\n    def measure(self):\n        return self.factor\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scaled = importlib.import_module("scaled_by").Scaled
    first = own_code(scaled)
    first.check(scaled)
    scaled.factor = 0.5
    with pytest.raises(ValueError, match=r"Scaled\.factor has been set to another value since it was registered"):
        first.check(scaled)
    assert own_code(scaled).hash != first.hash
    scaled.factor = 1.0
    assert own_code(scaled).hash == first.hash
    sys.modules.pop("scaled_by")
