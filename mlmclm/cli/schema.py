"""`mlmclm schema`: print the JSON Schema of a kind of file, for editors."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from mlmclm.cli.output import print_json


def schema(
    kind: Annotated[
        str, Argument(metavar="study|sweep|space|protocol|claims", help="The kind of file that the schema describes.")
    ],
) -> None:
    """Prints the JSON Schema of a kind of YAML file. With it, an editor explains and completes keys, and marks wrong ones.

    With the YAML language server, a file names its schema in its first line: `# yaml-language-server: $schema=space.json`.

    Example: mlmclm schema space > space.json
    """
    from mlmclm.studies.json_schema import schema_of

    print_json(schema_of(kind))
