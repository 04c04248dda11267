"""The packages of docs/architecture.md: imports go downwards, without circles, and only backends know kernels."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

cli = pytest.importorskip("importlinter.cli", reason="import-linter is not installed: make .venv/.installed-dev")
grimp = pytest.importorskip("grimp")  # import-linter's own graph
ROOT = Path(__file__).resolve().parents[1]


def test_packages_import_as_the_architecture_says(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == 0, capsys.readouterr().out


def test_every_package_is_in_the_architecture_s_picture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"\w+", page.partition("```mermaid")[2].partition("```")[0]))
    packages = {path.name for path in (ROOT / "mlmclm").iterdir() if (path / "__init__.py").is_file()}
    assert packages <= drawn


def test_no_chain_of_imports_is_longer_than_28_modules() -> None:
    graph = grimp.build_graph("mlmclm", cache_dir=None)

    @cache
    def longest(module: str) -> tuple[str, ...]:
        return (module, *max(map(longest, graph.find_modules_directly_imported_by(module)), key=len, default=()))

    chain = max(map(longest, graph.modules), key=len)
    assert len(chain) <= 28, " -> ".join(chain)


def test_the_architecture_s_picture_shows_the_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = {package: set(to.split(" & ")) for package, to in re.findall(r"^    (\w+) --> (.+)$", page, re.MULTILINE)}
    implied = {package: set(to) for package, to in drawn.items()}
    for _ in drawn:
        implied = {package: to.union(*(implied.get(below, ()) for below in to)) for package, to in implied.items()}
    graph = grimp.build_graph("mlmclm", cache_dir=None)
    packages = {path.parent.name for path in (ROOT / "mlmclm").glob("*/__init__.py")}
    for package in packages:
        imports = {
            below for below in packages - {package} if graph.direct_import_exists(importer=f"mlmclm.{package}", imported=f"mlmclm.{below}", as_packages=True)
        }  # fmt: skip
        assert drawn.get(package, set()) <= imports <= implied.get(package, set()), package


def test_names_are_given_once() -> None:
    """A module or public class is found by its name alone; only a verb's file may share the name of what it calls."""
    modules, classes = Counter[str](), Counter[str]()
    for path in (ROOT / "mlmclm").rglob("*.py"):
        if path.stem != "__init__" and path.parent.name != "cli":
            modules[path.stem] += 1
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes.update(each.name for each in tree.body if isinstance(each, ast.ClassDef) and each.name[0] != "_")
    assert {name for found in (modules, classes) for name, count in found.items() if count > 1} == set()


def closure(names: Iterable[str]) -> set[str]:
    """Return the distributions that these need, themselves included, by their normal names."""
    found: set[str] = set()
    wanted = list(names)
    while wanted:
        name = re.sub("[-_.]+", "-", wanted.pop()).lower()
        if name not in found:
            found.add(name)
            needed = [Requirement(each) for each in importlib.metadata.requires(name) or ()]
            wanted += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_a_reader_s_install_has_all_that_a_bundle_and_other_tools_files_need(tmp_path: Path) -> None:
    """Anything else is as if it were not installed."""
    page = (ROOT / "docs" / "publish.md").read_text(encoding="utf-8")
    listed = re.findall(r"^pip install -c constraints.txt (.+)$", page, re.MULTILINE)
    here = closure(listed[0].split())
    assert not here & {"torch", "ray", "transformers", "safetensors", "deepspeed", "mlflow", "datasets", "scikit-learn"}
    others = {
        module: of
        for module, of in importlib.metadata.packages_distributions().items()
        if not here & {re.sub("[-_.]+", "-", name).lower() for name in of} and "mlmclm" not in of
    }
    table = "run,example,score\n" + "".join(
        f"{run},{n},{(n + len(run)) % 3}\n" for run in ("a", "bb") for n in range(9)
    )
    (tmp_path / "scores.csv").write_text(table, encoding="utf-8")
    bundle = str(ROOT / "docs" / "replication" / "study-small-1k")
    commands = [
        ["claims", bundle],
        ["report", bundle, "--to", "report", "--figures", "figures"],
        ["advise", bundle],
        ["compare", "2m-clm-1k", "2m-mlm40-1k", "--study", bundle],
        ["compare", "a", "bb", "--scores", "scores.csv"],
        ["rank", "scores.csv"],
        ["import", "--help"],
    ]
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(others)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from mlmclm.cli.main import main
for words in {commands!r}:
    try:
        main(words)
    except SystemExit as ended:
        assert not ended.code, words
"""
    environment = {**os.environ, "MLMCLM_STORE": str(tmp_path / "store"), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "report.html").is_file() and any((tmp_path / "figures").glob("*.pdf"))


def test_what_tells_of_results_runs_without_torch_and_ray() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in ('analysis', 'answers', 'readers', 'reports', 'tracking'):\n"
        "    package = importlib.import_module(f'mlmclm.{name}')\n"
        "    for found in pkgutil.iter_modules(package.__path__):\n"
        "        importlib.import_module(f'mlmclm.{name}.{found.name}')\n"
        "from mlmclm.reports.text import family, metric\n"
        "assert (metric('f1'), family('retrieval')) == ('F1', 'Retrieval'), (metric('f1'), family('retrieval'))\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
