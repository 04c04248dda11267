"""A cluster that scales from zero: work waits for nodes, says what for and goes on; what can never come is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster as Raylets

from mlmclm.cluster.cluster import cluster_view
from mlmclm.cluster.placement import Growth, NodeType
from mlmclm.cluster.ray_cluster import prepare_environment
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.pretraining import states
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import PreparedStudy, prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.studies.work import train_missing_stages
from ray_nodes import head_with_nodes
from small_study import write_study


@pytest.fixture(scope="module")
def raylets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    """A session on a head without CPUs, to which nodes can be added."""
    prepare_environment()
    with head_with_nodes(tmp_path_factory.mktemp("ray"), num_cpus=0) as raylets:
        yield raylets


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlmclm.cluster.cluster.SECONDS_BEFORE_THE_FIRST_LINE", 0.5)
    monkeypatch.setattr("mlmclm.cluster.cluster.SECONDS_BETWEEN_LOOKS", 0.2)


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what an autoscaler can add, as `ray up` does: nodes with 2 CPUs, and those called `gpu` with a GPU too."""

    def write(**most: int) -> None:
        kinds = {
            name: {"resources": {"CPU": 2, **({"GPU": 1} if name == "gpu" else {})}, "max_workers": count}
            for name, count in most.items()
        }
        file = tmp_path / "autoscaling.yaml"
        file.write_text(yaml.safe_dump({"max_workers": 99, "available_node_types": kinds}))
        command = ["python", "monitor.py", f"--autoscaling-config={file}"]
        monkeypatch.setattr("mlmclm.cluster.cluster._monitor", lambda _: command)

    return write


@contextmanager
def scaled_up(raylets: Raylets, said: Callable[[], bool], **resources: int) -> Iterator[None]:
    """Adds a node as soon as something was said while the body runs, and removes it behind."""
    added: list[Any] = []

    def add() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not said():
            time.sleep(0.1)
        added.append(raylets.add_node(wait=False, **resources))

    thread = threading.Thread(target=add)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        for node in added:
            raylets.remove_node(node)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the driver says of its waits."""
    lines: list[str] = []
    monkeypatch.setattr("mlmclm.cluster.cluster.say", lines.append)
    return lines


def prepared(folder: Path, workers: str = "local") -> PreparedStudy:
    corpus = {"source": "prose", "text_documents": "paragraph", "validation_fraction": 0.1, "workers": workers}
    study = load_study(write_study(folder, corpus=corpus)).model_copy(
        update={"models": ("1m-clm-10",), "baseline": None}
    )
    return prepare_study(study, Place(folder / "store", folder / "data"))


def test_a_cluster_of_our_own_does_not_grow_and_one_with_an_autoscaler_as_far_as_it_says(
    raylets: Raylets, declare: Callable[..., None]
) -> None:
    found = cluster_view()()
    assert (len(found.nodes), found.total("CPU"), found.growth) == (1, 0, Growth())
    declare(gpu=3)
    assert cluster_view()().growth == Growth((NodeType("gpu", {"CPU": 2, "GPU": 1}, 3),), 99)


def test_a_stage_that_needs_more_than_the_autoscaler_s_maximum_is_refused(
    raylets: Raylets, tmp_path: Path, declare: Callable[..., None]
) -> None:
    declare(gpu=1, cpu=8)
    with pytest.raises(UserError, match=r"2 workers with a GPU each.*can have 1:.*lower recipe\.workers to 1"):
        train_missing_stages(prepared(tmp_path))


@pytest.mark.slow
def test_a_corpus_is_tokenised_when_the_first_node_is_there_and_refused_where_none_can_come(
    raylets: Raylets, tmp_path: Path, lines: list[str], declare: Callable[..., None]
) -> None:
    declare(cpu=0)
    with pytest.raises(UserError, match=r"Tokenising needs 1 CPU.*corpus\.workers: local"):
        prepared(tmp_path / "refused", workers="ray")
    declare(cpu=1)
    with scaled_up(raylets, lambda: bool(lines), num_cpus=1):
        assert prepared(tmp_path / "waiting", workers="ray").corpus.tokens > 0
    assert "tokenising waits for 1 x 1 CPU" in lines[0]


@pytest.mark.slow
def test_a_stage_waits_for_nodes_says_what_for_and_trains_when_they_are_there(
    raylets: Raylets, tmp_path: Path, lines: list[str], declare: Callable[..., None]
) -> None:
    declare(cpu=1)
    made = prepared(tmp_path)
    with scaled_up(raylets, lambda: bool(lines), num_cpus=2):
        assert train_missing_stages(made) == 1
    assert states.exists(made.place.store, made.plan.targets[0].key(made.fingerprint))
    free = "free are 0 of 0 CPUs; the autoscaler may add nodes (`ray status` says which it starts)"
    assert lines[0] == f"pretraining waits for 2 x 1 CPU; {free}"


@pytest.mark.slow
def test_a_stage_on_gpus_that_torch_does_not_see_is_a_fault_at_once_and_not_trained_on_cpus(
    raylets: Raylets, tmp_path: Path, declare: Callable[..., None]
) -> None:
    declare(gpu=2)
    node = raylets.add_node(wait=True, num_cpus=2, num_gpus=2)
    made = prepared(tmp_path)
    try:
        with pytest.raises(EnvironmentFault, match="offers Ray a GPU, but torch sees none there"):
            train_missing_stages(made)
    finally:
        raylets.remove_node(node)
    assert not states.exists(made.place.store, made.plan.targets[0].key(made.fingerprint))
