"""A key of the user's own code changes with what can change a result, with nothing else, and is the same in every process."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from mlmclm.member_code import OwnCode, own_code

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
    "mine/late/__init__.py": """
        def __getattr__(name):
            import importlib
            return importlib.import_module(".later", __name__).FACTOR
        """,
    "mine/late/later.py": "FACTOR = 1.0\n",
    "mine/inside.py": "FACTOR = 1.0\n",
    "mine/dotted.py": "FACTOR = 1.0\n",
    "mine/named.py": "FACTOR = 1.0\n",
    "mine/computed.py": "FACTOR = 1.0\n",
    "mine/starred.py": "SPREAD = 1.0\nOTHER = 2\n",
    "mine/fallback.py": "def fast(x):\n    return x\n",
    "mine/for_types.py": "class Array: pass\n",
    "mine/patches.py": "import types\nHOLDER = types.SimpleNamespace()\nHOLDER.value = 1\n",
    "mine/apart/__init__.py": "SHARE = 1\n",
    "mine/apart/deep.py": "\f\nLEFT = '\x1c\u2028'\nDEPTH = 1\n",
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
        from .late import sooner
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
                return outer(x) + mine.dotted.FACTOR + named.FACTOR + found.FACTOR + SPREAD + deep.DEPTH + passed_on(x) + sooner

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
    "a name that a package finds when it is asked": ("mine/late/later.py", "1.0", "2.0", True),
    "a name below characters that end no line": ("mine/apart/deep.py", "LEFT = '", "LEFT = '_", False),
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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'import_module("mine.computed")',
            "import_module(self.name)",
            r"mine\.member: line \d+ imports a module whose name it computes",
        ),
        ('importlib.import_module("mine.computed")', "__import__(self.name)", r"line \d+ calls __import__"),
        ("return outer(x)", "exec(x)", r"line \d+ calls exec"),
        ("return outer(x)", "return eval(x)", r"line \d+ calls eval"),
        (
            "return outer(x)",
            "return importlib.util.spec_from_file_location(x, x)",
            "calls importlib.util.spec_from_file_location",
        ),
        ("import mine.dotted", "import sys; sys.modules[x]", "looks for modules in sys.modules"),
        ("import mine.named as named", "import compiled as named", r"the module compiled .*has no source in Python"),
        ("import mine.named as named", "import broken as named", r"broken\.py, line 1: "),
    ],
)
def test_what_a_source_does_not_tell_is_refused(load: Callable[..., OwnCode], old: str, new: str, said: str) -> None:
    files = {"compiled.so": "", "broken.py": "def f(:\n", "mine/member.py": PACKAGE["mine/member.py"].replace(old, new)}
    assert files["mine/member.py"] != PACKAGE["mine/member.py"]
    with pytest.raises(ValueError, match=said):
        load({**PACKAGE, **files})


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


def test_the_environment_and_installed_packages_are_in_the_key_as_far_as_code_names_them(
    load: Callable[..., OwnCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        import os
        import pytest, numpy
        POWER, LEFT = float(os.environ.get("POWER", 1)), os.environ["PATH"]
        class Member:
            def value(self, x):
                return numpy.sqrt(x) ** POWER
        class Checked:
            def value(self, x):
                return pytest.approx(x)
        """
    files = {"mine/__init__.py": "", "mine/member.py": textwrap.dedent(text)}
    found = [load(files).hash, load(files, "mine.member:Checked").hash]
    monkeypatch.setattr("mlmclm.member_code.version_of", lambda package: f"{package} 0" if package == "pytest" else "")
    assert found[0] == load(files).hash and found[1] != load(files, "mine.member:Checked").hash
    monkeypatch.setenv("POWER", "2")
    assert found[0] != load(files).hash


def test_a_module_that_changed_on_disk_after_it_was_loaded_is_refused(load: Callable[..., OwnCode]) -> None:
    load(PACKAGE)
    file = Path(str(sys.modules["mine.top"].__file__))
    file.write_text(file.read_text().replace("FACTOR = 1.0", "FACTOR = 2.0"))
    with pytest.raises(ValueError, match=r"top\.py has changed since it was loaded: load it again"):
        own_code(sys.modules["mine.member"].Member)
    sys.path.insert(0, str(file.parents[1]))
    importlib.reload(sys.modules["mine.top"])
    sys.path.pop(0)
    own_code(sys.modules["mine.member"].Member)


def test_a_constant_that_other_code_has_changed_in_this_process_is_refused(load: Callable[..., OwnCode]) -> None:
    code = load(PACKAGE)
    member = sys.modules["mine.member"].Member
    code.check(member)
    sys.modules["mine.top"].UNUSED = 2
    code.check(member)
    sys.modules["mine.top"].FACTOR = 2.0
    with pytest.raises(ValueError, match=r"FACTOR of mine\.top is 2\.0 here, and 1\.0 in its source"):
        code.check(member)


def test_a_module_that_changed_before_a_function_loaded_it_is_refused(
    load: Callable[..., OwnCode], tmp_path: Path
) -> None:
    code = load(PACKAGE)
    assert {*code.unloaded} == {"mine.inside", "mine.dotted", "mine.named", "mine.computed"}
    member = sys.modules["mine.member"].Member
    code.check(member)
    (tmp_path / "here/mine/inside.py").write_text("FACTOR = 1.5 \n")
    os.utime(tmp_path / "here/mine/inside.py", (1, 1))
    code.check(member)  # nothing runs it yet
    member().value(1)
    with pytest.raises(ValueError, match=r"inside\.py has changed since it was registered: register it again"):
        code.check(member)


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
        def build(self, task, store, progress):
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
    assert computed.startswith(f"{kind} 'own' from ") and "imports a module whose name it computes" in computed


def test_a_process_that_receives_a_member_imports_its_modules_as_they_were_when_it_was_registered(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"mine/__init__.py": "", "mine/helper.py": "FACTOR = 3.0\n", "mine/root.py": """
import mlmclm
from mlmclm.schedules.decay import Decay

@mlmclm.register("schedule")
class Root(Decay):
    name = "root"

    def factor(self, left):
        from .helper import FACTOR
        return FACTOR * left
"""})  # fmt: skip
    send = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mine.root; from ray import cloudpickle; "
        "from mlmclm.cluster.worker_environment import registered; from mlmclm.registry import KINDS; "
        "sys.stdout.buffer.write(cloudpickle.dumps((registered(), KINDS['schedule'].keyed('root'))))"
    )
    sent = subprocess.run([sys.executable, "-c", send], capture_output=True, check=True).stdout
    shutil.rmtree(tmp_path / "mine")
    receive = (
        "import sys; from ray import cloudpickle; from mlmclm.registry import KINDS; "
        "_, keyed = cloudpickle.loads(sys.stdin.buffer.read()); "
        "print(KINDS['schedule']['root']().factor(2.0), KINDS['schedule'].keyed('root') == keyed)"
    )
    received = subprocess.run([sys.executable, "-c", receive], input=sent, capture_output=True, check=True)
    assert received.stdout.split() == [b"6.0", b"True"]


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
