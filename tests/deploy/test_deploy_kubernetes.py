"""The manifests for KubeRay: valid by the operator's schema, and in step with this repository."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import jsonschema
import pytest
import ray
from autoscaling import BUNDLES, kinds_started
from kuberay_schema import KEPT, ROOT, manifests
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

SCHEMA = json.loads(KEPT.read_text(encoding="utf-8"))
MANIFESTS = {manifest["kind"]: manifest for manifest in manifests()}


@pytest.mark.parametrize("kind", ["RayCluster", "RayJob"])
def test_the_operator_s_schema_accepts_it(kind: str) -> None:
    jsonschema.validate(MANIFESTS[kind], SCHEMA[kind])


def test_the_schema_refuses_what_the_operator_would() -> None:
    cluster = copy.deepcopy(MANIFESTS["RayCluster"])
    cluster["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(cluster, SCHEMA["RayCluster"])
    job = copy.deepcopy(MANIFESTS["RayJob"])
    job["spec"]["entrypoint"] = ["mlmclm"]
    with pytest.raises(jsonschema.ValidationError, match="not of type 'string'"):
        jsonschema.validate(job, SCHEMA["RayJob"])


def test_the_job_is_of_this_cluster_whose_pods_share_the_store_of_the_image() -> None:
    cluster, claim = MANIFESTS["RayCluster"], MANIFESTS["PersistentVolumeClaim"]
    assert MANIFESTS["RayJob"]["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert cluster["spec"]["rayVersion"] == ray.__version__
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    image = (ROOT / "deploy" / "cuda.Dockerfile").read_text(encoding="utf-8")
    for pod in pods(cluster):
        (volume,) = pod["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (container,) = pod["containers"]
        (mount,) = container["volumeMounts"]
        assert (mount["name"], f"MLMCLM_STORE={mount['mountPath']} " in image) == (volume["name"], True)
        assert re.search(rf"--uid {pod['securityContext']['runAsUser']} ", image)
        assert {"name": "metrics", "containerPort": 8080} in container["ports"]
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert cluster["spec"]["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("bundle", BUNDLES)
def test_ray_starts_pods_with_gpus_for_work_on_gpus_alone(bundle: dict[str, float]) -> None:
    cluster = copy.deepcopy(MANIFESTS["RayCluster"])
    cluster["metadata"]["namespace"] = "default"
    assert kinds_started(_derive_autoscaling_config_from_ray_cr(cluster), bundle) == {"gpu" if "GPU" in bundle else "cpu"}  # fmt: skip


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]
