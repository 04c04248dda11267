"""`mlmclm store why`: what an artifact of the store was made from, and what would give it another key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from rich.table import Column
from typer import Argument

from mlmclm.cli import options
from mlmclm.cli.output import flat, print_json, show, show_table


def why(
    artifact: Annotated[
        str, Argument(metavar="KEY|PATH", help="A key or its first digits, or a file or folder in the store.")
    ],
    store: options.Store = options.DEFAULT_STORE,
    as_json: options.Json = False,
) -> None:
    """Says what a state, model, corpus, result or any other artifact was made from, what made it, and what was made from it.

    A change of a setting under "in the key" gives another key, so the artifact is made anew. Changes of the other settings do not.

    Examples:

    mlmclm store why 22f78e384cd6

    mlmclm store why mlmclm-store/studies/quickstart/models/1m-mlm40-1k
    """
    from mlmclm.studies.artifacts import Contents, artifact_size

    contents = Contents(store.resolve())
    target = contents.find(artifact)
    origin, damage = contents.origin(target), target.damage(read=False)
    needs, users = contents.needs(target), contents.users[target]
    studies = [study for study, artifacts in contents.studies.items() if target in artifacts]
    if as_json:
        lists = {"made_of": needs, "used_by": users}
        related = {name: [{"kind": item.kind, "key": item.key} for item in linked] for name, linked in lists.items()}
        facts = {"in_key": dict(origin.facts), "not_in_key": dict(origin.free), "made_by": dict(origin.made_by)}
        print_json(
            {
                "kind": target.kind,
                "key": target.key,
                "bytes": artifact_size(target),
                "damage": damage,
                **facts,
                **related,
                "studies": studies,
            }
        )
        return
    show(f"{target.kind}: {target.key}, {artifact_size(target) / 2**20:,.1f} MiB, {damage or 'there'}")
    _facts("in the key: a change makes it anew", origin.facts)
    _facts("not in the key", origin.free)
    _facts("made by", origin.made_by)
    for title, linked in (("made of", needs), ("used by", users)):
        kinds = dict.fromkeys(item.kind for item in linked)
        for kind in kinds:
            keys = [item.key[:16] for item in linked if item.kind == kind]
            more = f" and {len(keys) - 5:,} more" if len(keys) > 5 else ""
            show(f"{title} {kind}: {', '.join(keys[:5])}{more}")
    show(f"studies that use it: {', '.join(studies) or 'none'}")


def _facts(title: str, facts: Mapping[str, Any]) -> None:
    if facts:
        show_table((title, Column("value")), list(flat(facts)))
