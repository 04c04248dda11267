"""The part of Compute Engine's published schema of instances that `deploy/gcp.yaml` uses, as the tests keep it.

    python tests/deploy/compute_schema.py compute.v1.json

writes `compute.json` again from the discovery document, which google-api-python-client has in
googleapiclient/discovery_cache/documents. A new key in `node_config` needs that. The document is under the Apache License
2.0, and has 5 MB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from kuberay_schema import ROOT, part_for

KEPT = Path(__file__).with_name("compute.json")
DEPTH = 5
"""Maximum depth of the objects and lists in the schema."""


def inlined(schema: dict[str, Any], schemas: dict[str, Any], depth: int = DEPTH) -> dict[str, Any]:
    """Return a schema of a discovery document as JSON schema, without references."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    # An integer of 64 bits is a string for Google, which also takes a number.
    long = schema.get("format") in ("int64", "uint64")
    inline: dict[str, Any] = {"type": ["string", "integer"] if long else schema["type"]}
    if "enum" in schema:
        inline["enum"] = schema["enum"]
    if depth and "properties" in schema:
        inline["properties"] = {key: inlined(entry, schemas, depth - 1) for key, entry in schema["properties"].items()}
    if depth and "items" in schema:
        inline["items"] = inlined(schema["items"], schemas, depth - 1)
    return inline


def main() -> None:
    """Write the part of the schema that the nodes use."""
    schemas = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["schemas"]
    kinds = yaml.safe_load((ROOT / "deploy" / "gcp.yaml").read_text(encoding="utf-8"))["available_node_types"]
    nodes = [kind["node_config"] for kind in kinds.values()]
    comment = {"$comment": "From Compute Engine's discovery document, Apache License 2.0; see compute_schema.py."}
    part = part_for(nodes, {"type": "array", "items": inlined({"$ref": "Instance"}, schemas)})["items"]
    KEPT.write_text(json.dumps(comment | part, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
