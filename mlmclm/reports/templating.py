"""Pages and cards from the templates of `templates/`; pages load nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mlmclm.reports import text


def render(template: str, **content: Any) -> str:
    """Return a page or a card; text of a page is escaped, and a name in the template without a value is an error."""
    return _environment().get_template(template).render(**content)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mlmclm.reports", "templates"),
        autoescape=lambda name: name is not None and not name.endswith(".md.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"marked": marked, "code": code, "table": table, "line": line}
    return environment


def marked(sentence: str) -> Markup:
    """Return a sentence for a page, with text between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(sentence))))


def table(values: Mapping[str, Any]) -> str:
    """Return a table of labels and values in Markdown."""
    rows = [f"| {line(str(label).replace('_', ' '))} | {line(text.plain(value))} |" for label, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def line(value: object) -> str:
    """Return a value as one line of Markdown, which can stand in a table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def code(body: str, language: str) -> str:
    """Return a block of code in Markdown."""
    body, fence = body.strip("\n"), "```"
    # The fence must be longer than any in the text, so that the text cannot close it.
    while fence in body:
        fence += "`"
    return f"{fence}{language}\n{body}\n{fence}"
