"""JSON Schemas of the YAML files that users write, with which an editor completes keys and marks wrong ones."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from mlmclm.analysis.claim import ClaimFile
from mlmclm.errors import unknown
from mlmclm.studies.study_file import StudyFile, SweepFile
from mlmclm.sweeps.protocols import ProtocolFile
from mlmclm.sweeps.space import Space

KINDS: dict[str, type[BaseModel]] = {
    "study": StudyFile,
    "sweep": SweepFile,
    "space": Space,
    "protocol": ProtocolFile,
    "claims": ClaimFile,
}


class _ForEditors(GenerateJsonSchema):
    """Also accepts whole numbers such as 4_200_000, which YAML 1.1 reads as a number but editors read as a string."""

    def int_schema(self, schema: Any) -> JsonSchemaValue:
        number = super().int_schema(schema)
        return {"anyOf": [number, {"type": "string", "pattern": "^[0-9]+(_[0-9]+)+$"}]}


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file; a `UserError` names the `KINDS` if it is none of them."""
    if kind not in KINDS:
        raise unknown("kind of file", kind, KINDS)
    schema = KINDS[kind].model_json_schema(schema_generator=_ForEditors)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}
