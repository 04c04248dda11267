"""Prepares an AWS account for cluster.yaml, once: the rights of the nodes, and a shared file system unless --bucket-only.

    python deploy/aws_account.py --region us-west-2 --bucket my-bucket

Run with credentials that may create roles, such as your own. Run again, it finds what is there and changes nothing.
It prints the address of the file system, which `cluster.yaml` mounts.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from typing import Any

import boto3

NAME = "mlmclm"
NFS = 2049
SECONDS_TO_START, SECONDS_BETWEEN_LOOKS = 300.0, 2.0


def node_policies(bucket: str, node_role: str) -> dict[str, list[dict[str, Any]]]:
    """Return the statements of the roles: nodes use the bucket, and the head starts and ends nodes as well."""
    objects = [
        {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": f"arn:aws:s3:::{bucket}"},
        {
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            "Resource": f"arn:aws:s3:::{bucket}/*",
        },
    ]
    starts = [
        {"Effect": "Allow", "Action": "ec2:*", "Resource": "*"},
        {"Effect": "Allow", "Action": "iam:PassRole", "Resource": node_role},
        # The image's identifier is looked up with the rights of whoever starts the node.
        {"Effect": "Allow", "Action": "ssm:GetParameters", "Resource": "arn:aws:ssm:*::parameter/aws/service/*"},
    ]
    return {f"{NAME}-node": objects, f"{NAME}-head": objects + starts}


def make_profiles(iam: Any, bucket: str) -> None:
    """Create the instance profiles of cluster.yaml, each with a role of the same name."""
    may_assume = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    for name in (f"{NAME}-node", f"{NAME}-head"):
        there = iam.exceptions.EntityAlreadyExistsException
        with suppress(there):
            iam.create_role(RoleName=name, AssumeRolePolicyDocument=_policy([may_assume]))
        with suppress(there):
            iam.create_instance_profile(InstanceProfileName=name)
        with suppress(iam.exceptions.LimitExceededException):  # it has its role already
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    # The first spot instance makes this role, which the head may not. AWS calls an existing one invalid input.
    with suppress(iam.exceptions.InvalidInputException, iam.exceptions.EntityAlreadyExistsException):
        iam.create_service_linked_role(AWSServiceName="spot.amazonaws.com")
    node_role = iam.get_role(RoleName=f"{NAME}-node")["Role"]["Arn"]
    for name, statements in node_policies(bucket, node_role).items():
        iam.put_role_policy(RoleName=name, PolicyName=NAME, PolicyDocument=_policy(statements))


def make_file_system(ec2: Any, efs: Any) -> str:
    """Create an encrypted file system that the default network reaches from all of its zones; return its id."""
    (network,) = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    mine = [{"Name": "vpc-id", "Values": [network["VpcId"]]}]
    named = [*mine, {"Name": "group-name", "Values": [f"{NAME}-store"]}]
    groups = [group["GroupId"] for group in ec2.describe_security_groups(Filters=named)["SecurityGroups"]]
    if not groups:
        made = ec2.create_security_group(
            GroupName=f"{NAME}-store", Description="NFS from the network's own machines", VpcId=network["VpcId"]
        )
        groups = [made["GroupId"]]
        allowed = {"IpProtocol": "tcp", "FromPort": NFS, "ToPort": NFS, "IpRanges": [{"CidrIp": network["CidrBlock"]}]}
        ec2.authorize_security_group_ingress(GroupId=groups[0], IpPermissions=[allowed])
    try:
        made = efs.create_file_system(
            CreationToken=NAME, Encrypted=True, ThroughputMode="elastic", Tags=[{"Key": "Name", "Value": NAME}]
        )
        number = made["FileSystemId"]
    except efs.exceptions.FileSystemAlreadyExists:
        number = efs.describe_file_systems(CreationToken=NAME)["FileSystems"][0]["FileSystemId"]
    _wait(lambda: efs.describe_file_systems(FileSystemId=number)["FileSystems"])
    there = {target["SubnetId"] for target in efs.describe_mount_targets(FileSystemId=number)["MountTargets"]}
    for subnet in ec2.describe_subnets(Filters=[*mine, {"Name": "default-for-az", "Values": ["true"]}])["Subnets"]:
        if subnet["SubnetId"] not in there:
            efs.create_mount_target(FileSystemId=number, SubnetId=subnet["SubnetId"], SecurityGroups=groups)
    _wait(lambda: efs.describe_mount_targets(FileSystemId=number)["MountTargets"])
    return str(number)


def _policy(statements: list[dict[str, Any]]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def _wait(look: Any) -> None:
    """Wait until all that `look` returns is available."""
    deadline = time.monotonic() + SECONDS_TO_START
    while states := [each["LifeCycleState"] for each in look() if each["LifeCycleState"] != "available"]:
        if time.monotonic() > deadline:
            raise SystemExit(f"The file system is not available after {SECONDS_TO_START:.0f} s: {states}")
        time.sleep(SECONDS_BETWEEN_LOOKS)


def main() -> None:
    """Prepare the account and print the file system's address."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--region", required=True)
    parser.add_argument("--bucket", required=True, help="bucket that the nodes may use; it need not exist yet")
    parser.add_argument("--bucket-only", action="store_true", help="make no file system: the store is in the bucket")
    given = parser.parse_args()
    make_profiles(boto3.client("iam"), given.bucket)
    if given.bucket_only:
        return
    print("preparing the file system, which takes a minute or two", flush=True)
    number = make_file_system(boto3.client("ec2", given.region), boto3.client("efs", given.region))
    print(f"{number}.efs.{given.region}.amazonaws.com")


if __name__ == "__main__":
    main()
