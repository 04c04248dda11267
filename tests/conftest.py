"""Shared fixtures. No test uses a fixed port or the user's home folder."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # runs are short, and a check sees their end

# Each test has its own home folder, in which all of its processes would otherwise compile the loops again.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "loops"))

# Some images forbid bytecode. The many processes that tests start would then compile the package again, a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = ["object_stores"]

FIRST = (
    # The first computes the study that several files share, and compiles the loops. The next ones need neither.
    "test_cli_study.py",
    "test_corpora_ray.py",
    "test_service_mlflow_server.py",
    "test_cluster_ray_cluster.py",
    "test_cli_interruption.py",
    # Other files that take long, the longest first.
    "test_pretraining_failures.py",
    "test_pretraining_phases.py",
    "test_pretraining_chunks.py",
    "test_pretraining_registered.py",
    "test_sweeps_launch.py",
    "test_tune.py",
    "test_studies_zero_shot.py",
    "test_pretraining_engine.py",
    "test_cli_wrong_inputs.py",
    "test_finetuning_cell.py",
    "test_docs.py",
    "test_cli_docs.py",
    "test_backends_choice.py",
    "test_backends_liger.py",
    "test_storage_faults.py",
    "test_backends_loops.py",
    "test_backends_tiles.py",
    "test_cli_compare.py",
    "test_dashboards_metrics.py",
    "test_cli_finetune.py",
    "test_backends_host.py",
    "test_backends_kernels.py",
    "test_launches_rendezvous.py",
    "test_finetuning_padding.py",
    "test_finetuning_chunks.py",
    "test_corpora_shards.py",
    "test_results_examples.py",
)
"""Files that take long, in the order in which they start, so that none of them runs alone at the end."""

MTEB = (
    "test_evaluation_chance.py",
    "test_evaluation_mteb.py",
    "test_finetuning_sentence_encoder.py",
    "test_models_given_kernels.py",
    "test_readers.py",
)
"""Files that import mteb, which takes longer than their tests: one of pytest's processes runs them all."""

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the tests of the files in `FIRST` to the front."""
    order = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


class OneProcess(LoadFileScheduling):
    """Runs the tests of a file in one of pytest's processes, and those of all files of `MTEB` in one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "mteb" if Path(file).name in MTEB else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneProcess:
    """Replaces the scheduler of `--dist loadfile`."""
    return OneProcess(config, log)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real tasks beside the checkout; the test is skipped where it is absent."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data, which is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def shared_tokenizers() -> Path:
    """The folder of published tokenizers beside the checkout; the test is skipped where it is absent."""
    folder = SHARED / "tokenizers"
    if not folder.is_dir():
        pytest.skip("needs ../shared/tokenizers, which is not beside this checkout")
    return folder


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test its own home folder, so that none reads or writes the user's."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def registers() -> Iterator[None]:
    """Unregister, at the end of a test, what it has registered."""
    from mlmclm.registry import KINDS

    yield
    for registry in KINDS.values():
        for name in [*registry.registered]:
            registry.remove(name)
        registry.forget()


def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that pytest's processes share."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root


class Finished(NamedTuple):
    """A study that has run to its end undisturbed, in its own process. Tests must not change it."""

    study: Path
    store: Path
    home: Path


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The finished study, computed once for all of pytest's processes."""
    from mlmclm.storage.files import in_turn
    from small_study import run, write_study

    root = common(tmp_path_factory)
    folder = root / "finished-study"
    paths = Finished(folder / "study" / "study.yaml", folder / "store", folder / "home")
    with in_turn(root / "finished-study.lock"):
        if not folder.exists():
            paths.home.mkdir(parents=True)
            study = yaml.safe_load(write_study(paths.study.parent).read_text())
            study["recipe"]["revisions_every"] = 10
            paths.study.write_text(yaml.safe_dump(study))
            command = ("study", paths.study, "--store", paths.store, "--data", paths.study.parent / "data")
            code, _, errors = run(*command, home=paths.home, timeout=1500)
            (folder / "ended").write_text(f"{code}\n{errors}")
        code, _, errors = (folder / "ended").read_text().partition("\n")
    assert code == "0", errors
    return paths


@pytest.fixture(scope="session", autouse=True)
def one_database(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let MLflow create one database for all of pytest's processes, which takes seconds, and copy it for each test."""
    from mlmclm.storage.files import in_turn
    from mlmclm.tracking import database as module

    root = common(tmp_path_factory)
    original, make = root / "made.db", module._make

    @wraps(make)
    def copy(database: Path) -> None:
        with in_turn(root / "made.lock"):
            if not original.exists():
                make(original)
        shutil.copy(original, database)
        with closing(sqlite3.connect(database)) as connection, connection:
            location = f"{module.artifact_location(database)}/0"
            connection.execute("UPDATE experiments SET artifact_location = ?", (location,))

    module._make = copy


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose MLflow database has a schema and nothing else."""
    from small_mlflow import export

    store = tmp_path_factory.mktemp("empty")
    export(store, [], experiment="unused")
    return store


@pytest.fixture
def mlflow_store(empty_store: Path, tmp_path: Path) -> Path:
    """A copy of `empty_store`."""
    return Path(shutil.copytree(empty_store, tmp_path / "store"))
