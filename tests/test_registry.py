"""Whatever can be added is added in one way; keys tell code apart, and workers get what a notebook has defined."""

from __future__ import annotations

import linecache
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mlmclm
from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.finetuning.protocol import Protocol
from mlmclm.plans.names import parse_name as parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import history
from mlmclm.registry import KINDS
from mlmclm.schedules.decay import DECAYS, finetuning_rate
from mlmclm.tasks.declared_tasks import get_task, task_names
from registered_members import Root

EVEN = """
import mlmclm
from mlmclm.objectives.mlm import Masked

SHARE = 2

def every(tokens):
    return tokens[:, ::SHARE]

@mlmclm.register("objective")
class Even(Masked):
    name = "even"
    examples = ("even10",)

    @property
    def words(self):
        return "even tokens"

    def label(self, tokens, draw):
        return every(tokens), tokens
"""


pytestmark = pytest.mark.usefixtures("registers")


def cell(source: str, number: int = 1) -> dict[str, Any]:
    """Runs a cell as IPython does: in `__main__`, which has no file, with its source in `linecache`."""
    name = f"/tmp/ipykernel_1/{number}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType("__main__")
    exec(compile(source, name, "exec"), module.__dict__)
    return module.__dict__


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


def test_what_is_registered_is_found_by_its_name_like_what_is_built_in() -> None:
    assert mlmclm.register("schedule", None, Root) is Root
    assert DECAYS["root"] is Root and [*DECAYS][:5] == ["linear", "1-sqrt", "1-square", "cosine", "constant"]
    protocol = parse_config(Protocol, {"decay": "root"}, where="here")
    assert finetuning_rate(1.0, 75, 100, 0.0, protocol.decay) == 0.5
    assert protocol.identity()["decay"] == DECAYS.keyed("root") != "root"
    assert Protocol.of_result(protocol.identity()).decay == "root"


def test_an_unknown_name_and_kind_say_what_there_is() -> None:
    with pytest.raises(UserError, match=r"unknown schedule 'cosin'\. Did you mean 'cosine'\? Allowed: linear, 1-sqrt"):
        DECAYS["cosin"]
    with pytest.raises(UserError, match=r"unknown kind of member 'objektive'\. Did you mean 'objective'\?"):
        mlmclm.register("objektive")


def test_a_name_that_is_taken_says_by_whom_and_its_own_place_may_define_it_again(notebook: None) -> None:
    with pytest.raises(
        UserError, match=r"schedule 'cosine'.*mlmclm\.schedules\.decays\.Cosine and from .*test_registry"
    ):
        mlmclm.register("schedule", None, type("Cosine", (Root,), {"name": "cosine"}))
    mlmclm.register("schedule", None, Root)
    mlmclm.register("schedule", None, Root)
    with pytest.raises(UserError, match=r"schedule 'root': there are two of this name, from .*Root.* and from .*Other"):
        mlmclm.register("schedule", None, type("Other", (Root,), {}))
    again = cell(EVEN)["Even"], cell(EVEN.replace("SHARE = 2", "SHARE = 3"), 2)["Even"]
    assert KINDS["objective"]["even"] is again[1]


@pytest.mark.parametrize(
    ("kind", "name", "member", "said"),
    [
        ("schedule", "x", len, r"expected a subclass of mlmclm\.schedules\.decay\.Decay"),
        ("schedule", "other", Root, "has another name, 'root'; use one"),
        ("corpus", "x", 3, "expected something that can be called"),
        ("corpus", "a@b", len, "a name is letters"),
        ("generator", "x", object(), r"expected a mlmclm\.tasks\.generator\.Generator"),
    ],
)
def test_a_member_of_another_kind_is_refused(kind: str, name: str, member: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        mlmclm.register(kind, name, member)


def key(model: str = "1m-even10-3k") -> str:
    return history(parse_name(model), Recipe(decay_steps=0, warmup_steps=0)).key("shared")


def test_a_state_s_key_changes_with_the_code_of_its_objective_and_of_what_that_uses(notebook: None) -> None:
    changes = [
        ("", ""),
        ("SHARE = 2", "SHARE = 3"),
        ("[:, ::SHARE]", "[:, 1::SHARE]"),
        (", tokens\n", ", tokens + 1\n"),
    ]
    keys = []
    for number, (old, new) in enumerate(changes):
        cell(EVEN.replace(old, new) if old else EVEN, number)
        keys.append(key())
    assert len(set(keys)) == 4
    cell(EVEN, 9)
    assert key() == keys[0], "the same code in another cell has the same key"
    cell(EVEN.partition("    @property")[0], 8)
    assert key() not in keys, "a class without methods has a source too"
    cell("\n\n" + EVEN.replace("import mlmclm\n", "import mlmclm, json\n"), 10)
    assert key() == keys[0], "and so it has among other code"


def test_code_without_a_source_is_refused_where_a_key_is_made(notebook: None) -> None:
    source = EVEN.replace("    def label", "    def label_of")
    module = ModuleType("__main__")
    exec(source, module.__dict__)
    with pytest.raises(UserError, match=r"objective 'even'.*source of Even cannot be read"):
        key()


def test_an_installed_package_s_code_is_told_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("1.0", "1.1"):
        place = tmp_path / version / "site-packages"
        (place / f"outside-{version}.dist-info").mkdir(parents=True)
        (place / f"outside-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: outside\nVersion: {version}\n"
        )
        (place / f"outside-{version}.dist-info" / "entry_points.txt").write_text(
            "[mlmclm.objectives]\neven = outside_even:Even\n"
        )
        (place / "outside_even.py").write_text(EVEN.replace('@mlmclm.register("objective")', ""))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(place)
            patch.delitem(sys.modules, "outside_even", raising=False)
            KINDS["objective"].forget()
            assert KINDS["objective"].keyed("even") == f"even@outside {version}"
            keys.append(key())
    KINDS["objective"].forget()
    assert keys[0] != keys[1]


ENTRY_POINTS = """
[mlmclm.metrics]
lost = outside_lost:Lost
whole = outside_whole:Whole
[mlmclm.statistics]
gone = outside_whole:gone
[mlmclm.families]
ends = outside_ends:Ends
[mlmclm.readers]
odd = outside_whole:Whole
[mlmclm.tasks]
absent = outside_absent
tasks = outside_tasks
[mlmclm.schedules]
cosine = outside_whole:Whole
"""
WHOLE = """
from mlmclm.results.measures import WeightedMean
from mlmclm.tasks.metric import Metric

class Whole(Metric):
    name, title, family = "whole", "whole", "sequence-classification"

    @classmethod
    def measure(cls, columns, classes):
        return WeightedMean(columns["correct"])
"""


@pytest.mark.slow
def test_a_broken_entry_point_is_left_out_alone_with_its_package_and_the_reason(tmp_path: Path) -> None:
    place = tmp_path / "site-packages"
    (place / "outside-1.0.dist-info").mkdir(parents=True)
    (place / "outside-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (place / "outside-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (place / "outside_tasks").mkdir()
    sst2 = (Path(mlmclm.__file__).parent / "tasks" / "declarations" / "sst2.yaml").read_text()
    for name, text in {"mine": sst2.replace("name: sst2", "name: mine"), "sst2": sst2, "conll2003": "name: ["}.items():
        (place / "outside_tasks" / f"{name}.yaml").write_text(text)
    (place / "outside_lost.py").write_text("import no_such_module\n")
    (place / "outside_ends.py").write_text("raise SystemExit\n")
    (place / "outside_whole.py").write_text(WHOLE)
    program = """
from mlmclm.registry import KINDS
from mlmclm.tasks.declared_tasks import get_task, task_names
from mlmclm.tasks.family import Family
family = get_task("conll2003").kind, get_task("sst2").kind
print(len(task_names()), *family[1].labels_of_metrics())
print(*(name for kind in KINDS.values() if kind.kind != "task" for name, _ in kind.items()))
for kind, name in (("metric", "lost"), ("metric", "losst")):
    try:
        KINDS[kind][name]
    except Exception as error:
        print(type(error).__name__, error)
"""
    environment = os.environ | {"PYTHONPATH": str(place), "COLUMNS": "400"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metrics, members, asked, unknown = done.stdout.splitlines()
    assert int(metrics.split()[0]) == len(task_names()) + 1 and metrics.endswith(" whole")
    built_in = {name for kind in KINDS.values() if kind.kind != "task" for name, _ in kind.items()}
    assert built_in | {"whole"} == set(members.split())
    assert re.match(r"UserError entry point 'lost' .* of outside 1\.0 cannot be loaded: ModuleNotFoundError", asked)
    assert "unknown metric 'losst'. Did you mean" not in unknown and "Allowed: whole." in unknown
    said = done.stderr.splitlines()
    assert any(
        re.fullmatch(r"left out: .*sst2\.yaml: the task 'sst2' is already declared by .*", line) for line in said
    )
    assert any(re.match(r"left out: .*conll2003\.yaml: not valid YAML", line) for line in said)
    for point, reason in (
        ("lost", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("gone", "cannot be loaded: AttributeError"),
        ("ends", "cannot be loaded: SystemExit"),
        ("odd", "expected a subclass of mlmclm.readers.reader.Reader"),
        ("absent", "'outside_absent' is not a package that is installed"),
        ("cosine", "there are two of this name, from mlmclm.schedules.decays.Cosine and from"),
    ):
        (line,) = [line for line in said if f"entry point {point!r} of the group" in line]
        assert line.startswith("left out: ") and "outside 1.0" in line and reason in line


def test_a_task_is_registered_and_declared_like_one_in_a_file() -> None:
    sst2 = get_task("sst2")
    mlmclm.register("task", "mine", sst2.model_copy(update={"name": "mine"}))
    assert get_task("mine").source == sst2.source


def test_import_mlmclm_and_help_are_quick_because_members_are_found_when_they_are_needed() -> None:
    program = "import sys, mlmclm; mlmclm.register; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout.split()
    assert not {"torch", "ray", "numpy", "pandas", "mlmclm.objectives.objective"} & set(loaded)


ADDED = {
    "objectives/even.py": """
        from mlmclm.objectives.mlm import Masked


        class Even(Masked):
            name = "even"
            examples = ("even10",)
        """,
    "schedules/decays.py": """


        class Root(Decay):
            name = "root"

            def factor(self, left: float) -> float:
                return left**0.5
        """,
    "backends/optimizers/rules.py": """


        class Plain(Optimizer):
            name = "plain"

            @classmethod
            def build(cls, groups, settings):
                import torch

                return torch.optim.SGD(groups, lr=0.0)
        """,
    "backends/faster.py": """
        from mlmclm.backends.cpu import Cpu


        class Faster(Cpu):
            name = "faster"
        """,
    "pretraining/callbacks/watching.py": """
        from mlmclm.pretraining.callbacks.callback import Callback


        class Watching(Callback):
            pass
        """,
    "tasks/families/mood.py": """
        from mlmclm.tasks.families.sequence_classification import SequenceClassification


        class Mood(SequenceClassification):
            name = "mood"
        """,
    "readers/numbers_by_line.py": """
        from mlmclm.readers.reader import Reader


        class NumbersByLine(Reader):
            name = "numbers"
        """,
    "analysis/statistics/doubled.py": """


        def doubled(analysis):
            return analysis.best
        """,
}
"""Files that docs/architecture.md says to write into this package, by its file; a file that is there gets it at its end."""


def test_a_member_in_the_folder_that_the_architecture_names_is_found_without_another_line(tmp_path: Path) -> None:
    package = Path(mlmclm.__file__).parent
    shutil.copytree(package, tmp_path / "mlmclm", ignore=shutil.ignore_patterns("__pycache__"))
    table = (package.parent / "docs" / "architecture.md").read_text()
    for name, text in ADDED.items():
        with (tmp_path / "mlmclm" / name).open("a") as file:
            file.write(textwrap.dedent(text))
        assert re.search(rf"`{Path(name).parent}/(NAME|{Path(name).stem})\.py`", table), name
    program = (
        "from mlmclm.registry import KINDS; import sys; print(*(name for kind in sys.argv[1:] for name in KINDS[kind]))"
    )
    kinds = ("objective", "schedule", "optimizer", "backend", "callback", "family", "reader", "statistic")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", program, *kinds], env=environment, cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert {"even", "root", "plain", "faster", "Watching", "mood", "numbers", "doubled"} <= set(found.stdout.split()), (
        found.stderr
    )


def test_every_kind_has_a_line_in_the_architecture_s_table() -> None:
    page = (Path(mlmclm.__file__).parents[1] / "docs" / "architecture.md").read_text()
    words = {"schedule": "learning-rate schedule", "optimizer": "optimiser", "callback": "callback around a step",
             "family": "task family", "generator": "data that a package generates", "corpus": "corpus source",
             "reader": "reader of another tool's files"}  # fmt: skip
    assert {
        kind for kind in KINDS if not re.search(rf"^\| (an? )?{words.get(kind, kind)} \|", page, re.MULTILINE)
    } == set()
