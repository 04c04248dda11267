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

    A change of any setting that is listed under "in the key" gives another key, so that it is made anew. The others change neither.

    Examples:

    mlmclm store why 22f78e384cd6

    mlmclm store why mlmclm-store/studies/quickstart/models/1m-mlm40-1k
    """
    from mlmclm.studies.artifacts import Contents, size_of

    contents = Contents(store.resolve())
    found = contents.find(artifact)
    origin, damage = contents.origin(found), found.damage(read=False)
    needs, users = contents.needs(found), contents.users[found]
    studies = [study for study, own in contents.studies.items() if found in own]
    if as_json:
        lists = {"made_of": needs, "used_by": users}
        others = {name: [{"kind": each.kind, "key": each.key} for each in own] for name, own in lists.items()}
        facts = {"in_key": dict(origin.facts), "not_in_key": dict(origin.free), "made_by": dict(origin.made_by)}
        print_json(
            {
                "kind": found.kind,
                "key": found.key,
                "bytes": size_of(found),
                "damage": damage,
                **facts,
                **others,
                "studies": studies,
            }
        )
        return
    show(f"{found.kind}: {found.key}, {size_of(found) / 2**20:,.1f} MiB, {damage or 'there'}")
    _facts("in the key: a change makes it anew", origin.facts)
    _facts("not in the key", origin.free)
    _facts("made by", origin.made_by)
    for title, linked in (("made of", needs), ("used by", users)):
        kinds = dict.fromkeys(each.kind for each in linked)
        for kind in kinds:
            keys = [each.key[:16] for each in linked if each.kind == kind]
            more = f" and {len(keys) - 5:,} more" if len(keys) > 5 else ""
            show(f"{title} {kind}: {', '.join(keys[:5])}{more}")
    show(f"studies that use it: {', '.join(studies) or 'none'}")


def _facts(title: str, facts: Mapping[str, Any]) -> None:
    if facts:
        show_table((title, Column("value")), list(flat(facts)))
