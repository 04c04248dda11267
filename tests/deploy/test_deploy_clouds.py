"""`cluster.yaml` and `deploy/gcp.yaml`: valid for Ray's launcher, startable in an account, and in step with this repository."""

from __future__ import annotations

import copy
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import jsonschema
import pytest
import yaml
from autoscaling import BUNDLES, kinds_started
from compute_schema import KEPT
from kuberay_schema import ROOT
from moto import mock_aws
from ray.autoscaler._private.util import prepare_config, validate_config

from mlmclm.versions import PACKAGE

CLOUDS = {"aws": "cluster.yaml", "gcp": "deploy/gcp.yaml"}
STORES = {
    ("aws", "folder"): ("/shared/store", "ADDRESS:/ /shared"), ("aws", "bucket"): ("s3://my-bucket/store", None),
    ("gcp", "folder"): ("/shared/store", "ADDRESS:/shared /shared"), ("gcp", "bucket"): ("gs://my-bucket/store", None),
}  # fmt: skip
"""The value of MLMCLM_STORE in each variant, and the end of the command that mounts the folder, if it has one."""
REGION = "us-west-2"


def loaded(cloud: str, store: str = "folder") -> dict[str, Any]:
    text = (ROOT / CLOUDS[cloud]).read_text(encoding="utf-8")
    if store == "bucket":  # the second line in place of the first
        text = re.sub(r"\n  - echo 'export MLMCLM_STORE=.*\n  # - echo", "\n  - echo", text)
    return yaml.safe_load(text)


def workers(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]}


@pytest.fixture(params=CLOUDS)
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return loaded(request.param)


def test_rays_own_validator_accepts_it(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(cluster)))


def test_gpu_nodes_start_when_they_are_needed_and_end_when_they_are_idle(cluster: dict[str, Any]) -> None:
    assert len(workers(cluster)) > 2, "another kind stands in for one that cannot be had"
    for name, kind in workers(cluster).items():
        assert kind["resources"] == ({"CPU": 16} if name == "cpu" else {"CPU": 48, "GPU": 4})
        assert kind["min_workers"] == 0 < kind["max_workers"] <= cluster["max_workers"]
    assert cluster["idle_timeout_minutes"] > 0


@pytest.mark.parametrize("bundle", BUNDLES)
def test_ray_starts_nodes_with_gpus_for_work_on_gpus_alone(bundle: dict[str, float], cluster: dict[str, Any]) -> None:
    (kind,) = kinds_started(prepare_config(copy.deepcopy(cluster)), bundle)
    assert (kind == "cpu") == ("GPU" not in bundle)


def test_every_node_installs_this_wheel_with_the_constraints(cluster: dict[str, Any]) -> None:
    wheel = f"mlmclm-{PACKAGE}-py3-none-any.whl"
    sources = set(cluster["file_mounts"].values())
    assert sources == {f"dist/{wheel}", "constraints.txt", "~/.ray/auth_token"}
    home = f"/home/{cluster['auth']['ssh_user']}"
    commands = [command.replace("$HOME", home) for command in cluster["setup_commands"]]
    installed = next(command for command in commands if "[cuda" in command)
    for target, source in cluster["file_mounts"].items():
        assert Path(target).name == Path(source).name
        assert target in installed or source.endswith("auth_token")


@pytest.mark.parametrize(("cloud", "store"), STORES)
def test_the_store_is_a_shared_folder_or_a_bucket_alone(cloud: str, store: str, tmp_path: Path) -> None:
    """The commands about the store are run with programs that only note how they are called."""
    config, (address, mounted) = loaded(cloud, store), STORES[cloud, store]
    validate_config(prepare_config(copy.deepcopy(config)))
    programs, called = tmp_path / "programs", tmp_path / "called"
    programs.mkdir()
    (tmp_path / "mlmclm").mkdir()
    for name, ends in {"sudo": 0, "mountpoint": 1, "ray": 0}.items():
        (programs / name).write_text(f'#!/bin/bash\necho "$MLMCLM_STORE {name} $*" >> {called}\nexit {ends}\n')
        (programs / name).chmod(0o755)
    setup = [command for command in config["setup_commands"] if "mlmclm/store" in command]
    for command in [*setup, *config["head_start_ray_commands"], *config["worker_start_ray_commands"]]:
        own = {"HOME": str(tmp_path), "USER": "me", "RAY_HEAD_IP": "head", "PATH": f"{programs}:/usr/bin:/bin"}
        subprocess.run(["bash", "-c", f"ulimit() {{ :; }}; {command}"], env=own, check=True)
    *mounts, head, worker = called.read_text().splitlines()
    for start in (head, worker):
        assert start.startswith(f"{address} ray start --")
    if mounted is None:
        assert mounts == []
    else:
        assert any(" sudo mount " in line and line.endswith(f" {mounted}") for line in mounts)


def test_the_commands_are_shell_and_ray_requires_the_token(cluster: dict[str, Any]) -> None:
    starts = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]
    for command in [*cluster["setup_commands"], *starts]:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    for command in starts:
        assert "RAY_AUTH_MODE=token" in command
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
    assert len({instance["InstanceType"] for instance in started.values()}) == 5


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


@pytest.mark.usefixtures("account")
def test_an_account_for_a_bucket_alone_gets_no_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["aws_account.py", "--region", REGION, "--bucket", "b", "--bucket-only"])
    runpy.run_path(str(ROOT / "deploy" / "aws_account.py"), run_name="__main__")
    assert boto3.client("efs", REGION).describe_file_systems()["FileSystems"] == []
    assert len(boto3.client("iam").list_instance_profiles()["InstanceProfiles"]) == 2


def test_google_clouds_instances_have_the_fields_of_the_nodes() -> None:
    schema = json.loads(KEPT.read_text(encoding="utf-8"))
    nodes = [kind["node_config"] for kind in loaded("gcp")["available_node_types"].values()]
    for node in nodes:
        jsonschema.validate(node, schema)
    nodes[-1]["scheduling"]["provisioningmodel"] = "SPOT"
    with pytest.raises(jsonschema.ValidationError, match="provisioningmodel"):
        jsonschema.validate(nodes[-1], schema)


def test_google_clouds_workers_have_an_account_of_this_project_that_the_page_creates() -> None:
    config, page = loaded("gcp"), (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    for kind in workers(config).values():
        (account,) = kind["node_config"]["serviceAccounts"]
        name, _, domain = account["email"].partition("@")
        assert domain == f"{config['provider']['project_id']}.iam.gserviceaccount.com"
        assert f"gcloud iam service-accounts create {name}\n" in page and f"serviceAccount:{account['email']}" in page
