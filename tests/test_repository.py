"""The files around the package agree with it: workflows, images, the compose file, metadata, hooks."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from sqlalchemy import URL, make_url
from typer.main import get_command

from mlmclm.cli.main import app
from mlmclm.service.run_service import TARGETS as TARGETS_FILE
from mlmclm.service.state import service_folder
from mlmclm.versions import PACKAGE

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def loaded(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_targets_of_the_makefile(workflow: Path) -> None:
    made = 0
    for job in loaded(str(workflow.relative_to(ROOT)))["jobs"].values():
        choices = job.get("strategy", {}).get("matrix", {}).get("target", [])
        for step in job["steps"]:
            for targets in re.findall(r"\bmake (\S.*)", step.get("run", "")):
                assert {*choices} <= TARGETS if "${{ matrix.target" in targets else {*targets.split()} <= TARGETS
                made += 1
    assert made


def test_the_weekly_workflow_leaves_the_constraints_out() -> None:
    job = loaded(".github/workflows/weekly.yml")["jobs"]["test-all"]
    assert job["env"]["CONSTRAINTS"] == ""
    for file in ("Makefile", "scripts/install.sh"):
        assert "CONSTRAINTS" in (ROOT / file).read_text(encoding="utf-8")


def test_the_weekly_workflow_also_tries_versions_beyond_the_bounds(tmp_path: Path) -> None:
    job = loaded(".github/workflows/weekly.yml")["jobs"]["test-all"]
    assert job["strategy"]["matrix"]["bounds"] == ["kept", "lifted"]
    (step,) = (step for step in job["steps"] if "lifted" in step.get("if", ""))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(step["run"], shell=True, cwd=tmp_path, check=True)
    before, after = (tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (ROOT, tmp_path))
    assert before.keys() == after.keys()
    every = [before["dependencies"], *before["optional-dependencies"].values()]
    lifted = [after["dependencies"], *after["optional-dependencies"].values()]
    for old, new in zip(chain(*every), chain(*lifted), strict=True):
        own, other = Requirement(old), Requirement(new)
        assert (own.name, own.extras, str(own.marker)) == (other.name, other.extras, str(other.marker))
        assert {str(each) for each in other.specifier} == {
            str(each) for each in own.specifier if not str(each).startswith("<")
        }


def test_the_compose_file_starts_the_service_with_options_that_it_has() -> None:
    service = loaded("deploy/compose.yaml")["services"]["service"]
    verb, *options = service["command"]
    known = {name for own in get_command(app).commands[verb].params for name in own.opts}  # type: ignore[attr-defined]
    assert verb == "up" and {option for option in options if option.startswith("-")} <= known
    for kind in ("cpu", "cuda"):
        image = (ROOT / "deploy" / f"{kind}.Dockerfile").read_text(encoding="utf-8")
        assert f"DEVICE={kind} " in image and "scripts/install.sh" in image and "WHEEL=" in image
        for folder in re.findall(r"[\w/]*/store", str(service["volumes"])):
            assert f"MLMCLM_STORE={folder}" in image


def test_the_compose_file_s_services_find_each_other_and_no_other_machine_finds_them() -> None:
    compose = loaded("deploy/compose.yaml")
    services = compose["services"]
    (port,) = services["mlflow"]["ports"]
    assert "http://" + port.rpartition(":")[0] in services["service"]["command"]
    assert database_of(compose).host == "database"
    config = loaded("deploy/prometheus.yml")
    (files,) = (found["files"] for job in config["scrape_configs"] for found in job["file_sd_configs"])
    assert files == [f"/store/{service_folder(Path('/s')).name}/{TARGETS_FILE}"]
    assert {"./prometheus.yml:/etc/prometheus/prometheus.yml:ro", "store:/store:ro"} < {
        *services["prometheus"]["volumes"]
    }
    # Whoever uses a new volume first decides who owns it, and Prometheus has another user.
    assert services["prometheus"]["depends_on"] == ["service"]
    listening = services["service"]["environment"]
    assert f"--web.listen-address={listening['RAY_PROMETHEUS_HOST'].removeprefix('http://')}" in services["prometheus"]["command"]  # fmt: skip
    grafana = services["grafana"]["environment"]
    assert listening["RAY_GRAFANA_HOST"] == f"http://{grafana['GF_SERVER_HTTP_ADDR']}:3000"
    assert grafana["GF_PATHS_PROVISIONING"] == f"{grafana['MLMCLM_DASHBOARDS']}/provisioning"
    for name, own in services.items():
        assert own.get("network_mode") == "host" or all(each.startswith("127.0.0.1:") for each in own.get("ports", []))
        sources = {volume.partition(":")[0] for volume in own.get("volumes", [])}
        assert sources - {"../dashboards", "./prometheus.yml"} <= {*compose["volumes"]}, name


def database_of(compose: dict[str, Any]) -> URL:
    """The address of MLflow's database, with a password in place of the variable."""
    address = compose["services"]["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"]
    return make_url(re.sub(r"\$\{.*?\}", "password", address))


def test_the_image_has_the_driver_of_the_compose_file_s_database() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (driver,) = (Requirement(own).name for own in project["optional-dependencies"]["postgresql"])
    assert driver.removesuffix("-binary") == database_of(loaded("deploy/compose.yaml")).get_dialect().driver
    for kind in ("cpu", "cuda"):
        assert " postgresql,s3\n" in (ROOT / "deploy" / f"{kind}.Dockerfile").read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = loaded("CITATION.cff")
    assert {project["version"], citation["version"]} == {PACKAGE}
    assert citation["license"] == project["license"]
    assert PACKAGE in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_upper_bound_of_a_dependency_has_its_reason_beside_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    bounded = [own for group in groups for own in group if "<" in str(Requirement(own).specifier)]
    assert len(bounded) >= 12
    assert [own for own in bounded if not re.search(re.escape(f'"{own}"') + r",? *# \w", text)] == []


def test_hooks_run_programs_that_make_lint_runs() -> None:
    lint = re.search(r"^lint:.*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert lint is not None
    for hook in loaded(".pre-commit-config.yaml")["repos"][0]["hooks"]:
        assert hook["language"] == "system"
        entry = hook["entry"].replace(".venv/bin/", "$(BIN)/")
        assert entry == "make lint" or entry in lint[1], entry


def test_benchmarks_scripts_and_examples_import_what_there_is() -> None:
    for path in chain.from_iterable((ROOT / name).glob("*.py") for name in ("benchmarks", "scripts", "examples")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mlmclm":
                module = import_module(str(node.module))
                for each in node.names:
                    found = hasattr(module, each.name) or find_spec(f"{node.module}.{each.name}") is not None
                    assert found, f"{path}: {node.module} has no {each.name}"


PRIVATE = re.compile(
    r"ray\._private|from ray\._\S* import|from ray\S* import .*\b_[a-zA-Z]|from ray\.\S*_internal\S* import|from mlflow\.store\S* import"
)


def test_the_table_of_private_functions_has_every_file_that_uses_some() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)/(\w+\.py)`(?:, `(\w+\.py)`)? \|", table, re.MULTILINE)
    using = {
        file.relative_to(ROOT / "mlmclm").as_posix()
        for file in (ROOT / "mlmclm").rglob("*.py")
        if PRIVATE.search(file.read_text(encoding="utf-8"))
    }
    assert {f"{folder}/{name}" for folder, *names in told for name in names if name} == using
