"""Pages from the templates of `templates/`, which contain everything that they need."""

from __future__ import annotations

from typing import Any

import jinja2


def render(template: str, **content: Any) -> str:
    """Return a page; what comes from outside is escaped, and a name that is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mlmclm.reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)
