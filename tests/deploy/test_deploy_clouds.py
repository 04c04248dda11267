"""`cluster.yaml`: valid for Ray's launcher, and in step with this repository."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))


def test_rays_own_validator_accepts_it(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(cluster)))


def test_the_validator_would_refuse_a_misspelt_key(cluster: dict[str, Any]) -> None:
    broken = {**cluster, "idle_timeout": 5}
    with pytest.raises(Exception, match="idle_timeout"):
        validate_config(prepare_config(broken))


def test_gpu_nodes_start_when_they_are_needed_and_end_when_they_are_idle(cluster: dict[str, Any]) -> None:
    workers = {
        name: kind for name, kind in cluster["available_node_types"].items() if name != cluster["head_node_type"]
    }
    assert workers
    for kind in workers.values():
        assert kind["resources"]["GPU"] > 0
        assert kind["min_workers"] == 0 < kind["max_workers"] <= cluster["max_workers"]
    assert cluster["idle_timeout_minutes"] > 0


def test_it_installs_this_package_with_the_constraints_and_keeps_the_dashboard_private(cluster: dict[str, Any]) -> None:
    mounted = next(target for target, source in cluster["file_mounts"].items() if source == ".")
    name = mounted.rsplit("/", 1)[-1]
    assert any(f"-c $HOME/{name}/constraints.txt $HOME/{name}" in command for command in cluster["setup_commands"])
    assert (ROOT / "pyproject.toml").is_file()
    assert any("--dashboard-host=127.0.0.1" in command for command in cluster["head_start_ray_commands"])
