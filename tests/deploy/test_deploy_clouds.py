"""`cluster.yaml` and `deploy/gcp.yaml`: valid for Ray's launcher, startable in an account, and in step with this repository."""

from __future__ import annotations

import copy
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws
from ray.autoscaler._private.util import prepare_config, validate_config

from mlmclm.versions import PACKAGE

ROOT = Path(__file__).resolve().parents[2]
CLOUDS = {"aws": "cluster.yaml", "gcp": "deploy/gcp.yaml"}
REGION = "us-west-2"


def loaded(cloud: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / CLOUDS[cloud]).read_text(encoding="utf-8"))


def workers(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]}


@pytest.fixture(params=CLOUDS)
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return loaded(request.param)


def test_rays_own_validator_accepts_it(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(cluster)))


def test_the_validator_would_refuse_a_misspelt_key(cluster: dict[str, Any]) -> None:
    broken = {**cluster, "idle_timeout": 5}
    with pytest.raises(Exception, match="idle_timeout"):
        validate_config(prepare_config(broken))


def test_gpu_nodes_start_when_they_are_needed_and_end_when_they_are_idle(cluster: dict[str, Any]) -> None:
    assert len(workers(cluster)) > 1, "another kind stands in for one that cannot be had"
    for kind in workers(cluster).values():
        assert kind["resources"] == {"CPU": 48, "GPU": 4}
        assert kind["min_workers"] == 0 < kind["max_workers"] <= cluster["max_workers"]
    assert cluster["idle_timeout_minutes"] > 0


def test_every_node_installs_this_wheel_with_the_constraints_and_shares_the_store(cluster: dict[str, Any]) -> None:
    wheel = f"mlmclm-{PACKAGE}-py3-none-any.whl"
    sources = set(cluster["file_mounts"].values())
    assert sources == {f"dist/{wheel}", "constraints.txt", "~/.ray/auth_token"}
    home = f"/home/{cluster['auth']['ssh_user']}"
    commands = [command.replace("$HOME", home) for command in cluster["setup_commands"]]
    installed = next(command for command in commands if "[cuda" in command)
    for target, source in cluster["file_mounts"].items():
        assert Path(target).name == Path(source).name
        assert target in installed or source.endswith("auth_token")
    assert any("mount -t nfs" in command and command.endswith('/shared) && sudo chown "$USER" /shared') for command in commands)  # fmt: skip


def test_the_commands_are_shell_and_ray_requires_the_token(cluster: dict[str, Any]) -> None:
    starts = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]
    for command in [*cluster["setup_commands"], *starts]:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    for command in starts:
        assert "RAY_AUTH_MODE=token" in command and "MLMCLM_STORE=/shared/store" in command
    assert "--dashboard-host=127.0.0.1" in starts[0]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An account in memory."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("account")
def test_an_account_is_prepared_once_and_the_nodes_start_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["aws_account.py", "--region", REGION, "--bucket", "b"])
        runpy.run_path(str(ROOT / "deploy" / "aws_account.py"), run_name="__main__")
        printed.append(capsys.readouterr().out.splitlines()[-1])
    assert printed[0] == printed[1] and printed[0].endswith(f".efs.{REGION}.amazonaws.com")
    efs = boto3.client("efs", REGION)
    (files,) = efs.describe_file_systems()["FileSystems"]
    assert printed[0].startswith(f"{files['FileSystemId']}.") and files["Encrypted"]
    zones = {target["AvailabilityZoneName"] for target in efs.describe_mount_targets(FileSystemId=files["FileSystemId"])["MountTargets"]}  # fmt: skip

    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    config = bootstrap_aws(prepare_config(loaded("aws")))
    assert zones >= set(config["provider"]["availability_zone"].split(","))
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    started = {}
    for name, kind in config["available_node_types"].items():
        (number,) = provider.create_node(kind["node_config"], {"ray-node-type": name}, 1)
        (started[name],) = boto3.client("ec2", REGION).describe_instances(InstanceIds=[number])["Reservations"][0]["Instances"]  # fmt: skip
        assert len(kind["node_config"]["SubnetIds"]) == 3, "a zone without room is followed by another"
    assert started["head"]["IamInstanceProfile"]["Arn"].endswith("/mlmclm-head")
    for name in workers(config):
        assert started[name]["IamInstanceProfile"]["Arn"].endswith("/mlmclm-node")
        assert started[name]["InstanceLifecycle"] == "spot"
    assert len({instance["InstanceType"] for instance in started.values()}) == 4


@pytest.mark.usefixtures("account")
def test_only_the_head_may_start_nodes_and_all_may_use_the_bucket() -> None:
    module = runpy.run_path(str(ROOT / "deploy" / "aws_account.py"))
    iam = boto3.client("iam")
    module["make_profiles"](iam, "my-bucket")
    allowed = {}
    for name in ("mlmclm-node", "mlmclm-head"):
        document = iam.get_role_policy(RoleName=name, PolicyName="mlmclm")["PolicyDocument"]
        actions = [statement["Action"] for statement in document["Statement"]]
        allowed[name] = {each for action in actions for each in ([action] if isinstance(action, str) else action)}
        assert "arn:aws:s3:::my-bucket/*" in json.dumps(document)
    assert {action.partition(":")[0] for action in allowed["mlmclm-node"]} == {"s3"}
    assert {"iam:PassRole", "ssm:GetParameters"} <= allowed["mlmclm-head"]


def test_google_clouds_instances_have_the_fields_of_the_nodes() -> None:
    api = pytest.importorskip("googleapiclient", reason="needs google-api-python-client, whose schemas it reads")
    folder = Path(api.__file__).parent / "discovery_cache" / "documents"
    schemas = json.loads((folder / "compute.v1.json").read_text(encoding="utf-8"))["schemas"]
    for kind in loaded("gcp")["available_node_types"].values():
        check(kind["node_config"], {"$ref": "Instance"}, schemas)
    with pytest.raises(AssertionError, match="provisioningmodel"):
        check({"scheduling": {"provisioningmodel": "SPOT"}}, {"$ref": "Instance"}, schemas)


def check(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Compare a value with a schema of Google's discovery documents, in which a key that it lacks is an error."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    kinds = {"object": dict, "array": list, "string": str | int, "integer": int, "boolean": bool, "number": float}
    assert isinstance(value, kinds[schema["type"]]), (value, schema["type"])
    if "enum" in schema:
        assert value in schema["enum"]
    if isinstance(value, dict):
        for key, own in value.items():
            assert key in schema["properties"], key
            check(own, schema["properties"][key], schemas)
    if isinstance(value, list):
        for own in value:
            check(own, schema["items"], schemas)
