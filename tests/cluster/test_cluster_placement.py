"""Which device workers get and what can never be placed: pure functions of the recipe and the cluster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlmclm.cluster.cluster import configured_growth
from mlmclm.cluster.placement import (
    HEAD,
    Cluster,
    Growth,
    NodeType,
    PlacementGroup,
    cell_bundle,
    check_place,
    check_workers,
    choose_device,
    is_offered,
    lacks_nodes,
    most_places,
    places,
    places_now,
    waiting_line,
    worker_bundle,
)
from mlmclm.errors import UserError
from mlmclm.plans.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
NONE = Growth()
GPU_NODES = Growth((NodeType("gpu", {"CPU": 48, "GPU": 4}, 8),), 8)


def cluster(*nodes: dict[str, float], growth: Growth | None = NONE, free: dict[str, float] | None = None) -> Cluster:  # fmt: skip
    return Cluster(nodes, free or {}, growth)


LAPTOP = cluster({"CPU": 2, HEAD: 1})
ONE_GPU = cluster({"CPU": 2, "GPU": 1, HEAD: 1})
FROM_ZERO = cluster({HEAD: 1}, growth=GPU_NODES)
UNKNOWN = cluster({"CPU": 2, HEAD: 1}, growth=None)


@pytest.mark.parametrize(
    ("choice", "where", "device"),
    [
        ("auto", LAPTOP, "cpu"),
        ("auto", ONE_GPU, "cuda"),
        ("auto", FROM_ZERO, "cuda"),
        ("auto", cluster({"CPU": 2, HEAD: 1}, {"GPU": 1}), "cuda"),
        ("auto", cluster({"GPU": 1, HEAD: 1}, growth=None), "cuda"),
        ("auto", cluster({HEAD: 1}, growth=Growth((NodeType("gpu", {"GPU": 4}, 0),))), "cpu"),
        ("cpu", ONE_GPU, "cpu"),
        ("cuda", LAPTOP, "cuda"),
        ("cpu", UNKNOWN, "cpu"),
    ],
)
def test_auto_is_gpus_wherever_there_are_or_can_be_any(choice: Any, where: Cluster, device: str) -> None:
    assert choose_device(choice, where) == device


def test_auto_does_not_guess_what_an_autoscaler_can_add() -> None:
    with pytest.raises(UserError, match=r"set recipe\.device to cuda or cpu"):
        choose_device("auto", UNKNOWN)


def test_fewer_gpus_than_workers_are_refused_and_never_replaced_by_cpus() -> None:
    with pytest.raises(UserError) as error:
        check_workers(2, "auto", choose_device("auto", ONE_GPU), ONE_GPU)
    assert str(error.value) == (
        "recipe.workers asks for 2 workers with a GPU each (recipe.device: auto), but the cluster can have 1: it has 2 CPUs and 1 GPUs on "
        "1 node, and no autoscaler that adds any. Either lower recipe.workers to 1, or add nodes with GPUs, or set recipe.device: cpu to "
        "train on CPUs."
    )


@pytest.mark.parametrize(
    ("workers", "choice", "where", "said"),
    [
        (33, "auto", FROM_ZERO, "can have 32: it has 0 CPUs and 0 GPUs on 1 node, and its autoscaler adds at most 8 of 'gpu' (48 CPUs, 4 GPUs)"),
        (33, "auto", FROM_ZERO, "lower recipe.workers to 32, or raise the autoscaler's limits"),
        (4, "auto", LAPTOP, "lower recipe.workers to 2, or add nodes with CPUs."),
        (1, "cuda", LAPTOP, "with a GPU each (recipe.device: cuda), but the cluster can have 0"),
        (1, "cuda", LAPTOP, "Either add nodes with GPUs, or set recipe.device: cpu"),
        (3, "cpu", ONE_GPU, "set recipe.device: cuda to train on GPUs"),
    ],
)  # fmt: skip
def test_what_can_never_come_is_refused_and_what_to_change_is_said(
    workers: int, choice: Any, where: Cluster, said: str
) -> None:
    with pytest.raises(UserError) as error:
        check_workers(workers, choice, choose_device(choice, where), where)
    assert said in str(error.value)


def test_what_can_still_come_is_not_refused() -> None:
    check_workers(32, "auto", "cuda", FROM_ZERO)
    check_workers(100, "cuda", "cuda", UNKNOWN)
    check_workers(2, "auto", "cpu", LAPTOP)
    check_place("A cell", {"CPU": 1, "GPU": 0.25}, FROM_ZERO, remedy="")
    check_place("A cell", {"CPU": 8}, UNKNOWN, remedy="")


def test_a_bundle_lies_on_one_node_and_the_autoscaler_s_limits_hold_together() -> None:
    assert places({"CPU": 48, "GPU": 1}, {"GPU": 0.1}) == 10, "not 9, as the quotient of two floats"
    assert places_now(cluster({"CPU": 3}, {"CPU": 3}), {"CPU": 2}) == 2
    both = Growth((NodeType("small", {"GPU": 1}, 10), NodeType("large", {"GPU": 8}, 2)), 3)
    assert most_places(cluster({HEAD: 1}, growth=both), {"GPU": 1}) == 8 + 8 + 1
    assert most_places(cluster({HEAD: 1}, {"GPU": 8}, growth=both), {"GPU": 1}) == 17, "that node is one of them"
    assert most_places(cluster({HEAD: 1, "CPU": 2}, growth=GPU_NODES), {"CPU": 1}) == 2 + 8 * 48
    assert most_places(cluster({HEAD: 1}, growth=GPU_NODES), {"GPU": 8}) == 0, "no node has 8"
    endless = Growth((NodeType("gpu", {"GPU": 1}, math.inf),))
    assert most_places(cluster({HEAD: 1}, growth=endless), worker_bundle("cuda")) == math.inf
    assert most_places(cluster({HEAD: 1, "CPU": 2}, growth=endless), worker_bundle("cpu")) == 2


def test_cells_have_a_gpu_of_a_cluster_with_gpus_unless_the_space_or_the_recipe_says_otherwise() -> None:
    assert cell_bundle(1, None, "auto", ONE_GPU) == {"CPU": 1, "GPU": 1}
    assert cell_bundle(1, None, "auto", FROM_ZERO) == {"CPU": 1, "GPU": 1}
    assert cell_bundle(2, 0.25, "auto", ONE_GPU) == {"CPU": 2, "GPU": 0.25}
    for explicit in (cell_bundle(1, 0, "auto", ONE_GPU), cell_bundle(1, None, "cpu", ONE_GPU)):
        assert explicit == {"CPU": 1}
    assert cell_bundle(1, None, "auto", LAPTOP) == {"CPU": 1}


def test_a_cell_that_no_node_can_hold_is_refused() -> None:
    with pytest.raises(UserError, match=r"A cell needs 1 CPU and 0\.25 GPU on one node.*Add nodes\."):
        check_place("A cell", {"CPU": 1, "GPU": 0.25}, LAPTOP, remedy="Add nodes.")
    with pytest.raises(UserError, match="A cell needs 3 CPU"):
        check_place("A cell", {"CPU": 3}, cluster({"CPU": 2}, {"CPU": 2}), remedy="")


def test_the_shipped_cluster_file_can_start_the_shipped_spaces_cells_and_a_stage() -> None:
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    from_file = cluster({HEAD: 1}, growth=configured_growth(config))
    kinds = tuple(NodeType(name, {"CPU": 48, "GPU": 4}, 8) for name in ("l4", "a10g", "l40s"))
    assert from_file.growth == Growth((*kinds, NodeType("cpu", {"CPU": 16}, 8)), 8)
    assert choose_device("auto", from_file) == "cuda"
    check_workers(32, "auto", "cuda", from_file)
    with pytest.raises(UserError):
        check_workers(33, "auto", "cuda", from_file)


def test_a_driver_says_what_it_waits_for_and_what_is_there() -> None:
    stage = PlacementGroup(True, ({"GPU": 1.0},) * 2)
    empty = cluster({HEAD: 1}, growth=GPU_NODES)
    rest = "free are 0 of 0 GPUs; the autoscaler may add nodes (`ray status` says which it starts)"
    assert waiting_line([stage], empty, all_of_them=False) == f"2 x 1 GPU; {rest}"
    assert waiting_line([stage, stage], empty, all_of_them=False) == f"2 x 1 GPU (2 times); {rest}"
    busy = cluster({"CPU": 4, HEAD: 1}, free={"CPU": 1})
    cell = PlacementGroup(True, ({"CPU": 2.0},))
    assert waiting_line([cell], busy, all_of_them=True) == "1 x 2 CPU; free are 1 of 4 CPUs; they are held by other work"  # fmt: skip
    left = cluster({HEAD: 1})  # its only node has died
    assert waiting_line([cell], left, all_of_them=True) == "1 x 2 CPU; free are 0 of 0 CPUs; no node offers that much now"  # fmt: skip


def test_a_cluster_whose_nodes_have_not_joined_yet_is_told_from_one_that_cannot_hold_a_cell() -> None:
    assert lacks_nodes(cluster({HEAD: 1}))
    assert not lacks_nodes(cluster({HEAD: 1}, growth=GPU_NODES)), "the autoscaler waits for what is asked for"
    assert not lacks_nodes(cluster({HEAD: 1}, growth=None)), "it may"
    assert not lacks_nodes(cluster({"CPU": 1, HEAD: 1}))


def test_a_sweep_waits_only_when_no_cell_has_what_it_needs() -> None:
    groups = [PlacementGroup(False, ({"CPU": 1.0},)), PlacementGroup(True, ({"CPU": 1.0},))]
    assert waiting_line(groups, LAPTOP, all_of_them=True) is None
    assert waiting_line(groups, LAPTOP, all_of_them=False) is not None
    assert waiting_line(groups[:1], LAPTOP, all_of_them=False) is None
    assert waiting_line([], LAPTOP, all_of_them=True) is None


def test_the_device_is_in_no_state_s_key() -> None:
    assert Recipe(device="cpu").identity() == Recipe(device="cuda").identity() == Recipe().identity()
    assert "device" not in Recipe(device="cuda").identity()


def test_resources_that_ray_makes_up_are_not_offered() -> None:
    group = "8a8b2c3d4e5f60718293a4b5c6d701000000"
    names = ["CPU", "GPU", "memory", "object_store_memory", "my_group_of", "accelerator_type:H100"]
    made_up = ["node:127.0.0.1", HEAD, f"CPU_group_{group}", f"CPU_group_0_{group}", f"bundle_group_{group}"]
    # As the dashboard of Ray 2.60 says them.
    made_up += ["CPUGroup00113Fdc404E0Ea833E6Dfdc0Fe3303000000", "bundleGroup0113Fdc404E0Ea833E6Dfdc0Fe3303000000"]
    assert [name for name in names + made_up if is_offered(name)] == names
