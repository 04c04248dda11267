"""The part of KubeRay's published schema that the manifests in `deploy/kubernetes` use, as the tests keep it.

    python tests/deploy/kuberay_schema.py FOLDER

writes `kuberay.json` again from the operator's custom resource definitions in a folder: ray.io_rayclusters.yaml and
ray.io_rayjobs.yaml of helm-chart/kuberay-operator/crds in github.com/ray-project/kuberay. A manifest with a new key needs
that. The definitions are under the Apache License 2.0, and have 2 MB.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("kuberay.json")
WORDS = ("type", "enum", "anyOf", "pattern", "minimum", "maximum", "required", "x-kubernetes-preserve-unknown-fields")


def manifests() -> Iterator[dict[str, Any]]:
    """Yield every object of `deploy/kubernetes`."""
    for file in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text(encoding="utf-8"))


def part_for(value: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that a value uses; it allows no other keys."""
    part = {word: schema[word] for word in WORDS if word in schema}
    if isinstance(value, dict) and "properties" in schema:
        properties = {key: item for key, item in value.items() if key in schema["properties"]}
        part["properties"] = {key: part_for(item, schema["properties"][key]) for key, item in properties.items()}
        part["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        part["additionalProperties"] = schema["additionalProperties"]
    if isinstance(value, list) and "items" in schema:
        parts = [part_for(item, schema["items"]) for item in value]
        part["items"] = parts[0]
        for other in parts[1:]:
            _join(part["items"], other)
    return part


def _join(part: dict[str, Any], other: dict[str, Any]) -> None:
    """Add to a part what another item of the same list uses."""
    for key, item in other.get("properties", {}).items():
        if key in part["properties"]:
            _join(part["properties"][key], item)
        else:
            part["properties"][key] = item


def main() -> None:
    """Write the parts of the schema that the manifests use, by kind."""
    kept = {"$comment": "From KubeRay's custom resource definitions, Apache License 2.0; see kuberay_schema.py."}
    for manifest in manifests():
        kind = str(manifest["kind"])
        file = Path(sys.argv[1]) / f"ray.io_{kind.lower()}s.yaml"
        if file.exists():
            versions = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["versions"]
            schema = next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"]
            # Of metadata, a definition says only that it is an object.
            kept[kind] = part_for(manifest, schema)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
