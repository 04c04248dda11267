"""Pages from the templates of `templates/`, which load nothing from elsewhere."""

from __future__ import annotations

import re
from typing import Any

import jinja2
from markupsafe import Markup, escape


def render(template: str, **content: Any) -> str:
    """Return a page; text is escaped, and a name in the template without a value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mlmclm.reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = code
    return environment.get_template(template).render(**content)


def code(sentence: str) -> Markup:
    """Return a sentence for a page, with text between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(sentence))))
