"""Parser of docstrings in three conventions: finds their parameters, results, exceptions and notes.

The conventions are numpydoc (underlined section titles), Google (indented sections; also the Hugging Face variant with
backticks) and Sphinx (field lists). Text is flattened to one line without markup. Text that does not parse is left out,
never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

Role = Literal["parameter", "attribute", "return", "exception", "note"]


class Field(NamedTuple):
    """An entry of a section; `name` and `type` may be empty, and an exception's class is its `type`."""

    role: Role
    name: str
    type: str
    description: str


class Parsed(NamedTuple):
    """A docstring's first sentence, the plain paragraphs after it, and the entries of its sections."""

    summary: str
    body: str
    fields: tuple[Field, ...]


_TITLES: dict[Role, tuple[str, ...]] = {
    "parameter": ("parameters", "other parameters", "args", "arguments", "keyword args", "keyword arguments"),
    "attribute": ("attributes",),
    "return": ("returns", "return", "yields"),
    "exception": ("raises", "exceptions"),
    "note": ("notes", "note"),
}
_ROLES = {title: role for role, titles in _TITLES.items() for title in titles}
# Titles of sections that are not used. They are known so that such a section ends the one before it.
_OTHER_TITLES = frozenset((
    "examples", "example", "see also", "references", "warnings", "warning", "warns", "methods", "todo", "usage", "shape",
))  # fmt: skip

# The line under a numpydoc title.
_UNDERLINE = re.compile(r"^[-=~^]{3,}\s*$")
# "Args:"
_GOOGLE_TITLE = re.compile(r"^([A-Z][A-Za-z ]{2,20}):\s*$")
# "name (type): description", with stars or backticks around the name or without.
_GOOGLE_ENTRY = re.compile(r"^[*`]*(\w+(?:, \*?\w+)*)[`]*(?: \((.*?)\))?\s*:(?:\s+(.*))?$")
# Such an entry as the first line of a docstring, which then has no summary.
_BARE_ENTRY = re.compile(r"^[*`]*\w+`*(?: \([^)]*\))?:\s")
# "name : type", the description being on the lines below.
_NUMPY_ENTRY = re.compile(r"^[*`]*(\w+(?:, ?\*{0,2}\w+)*)`*\s*:\s*(.*)$")
# "package.SomeError: description", or the class alone.
_EXCEPTION = re.compile(
    r"^[`:~.\w]*?([A-Z]\w*(?:Error|Exception|Warning|Exit|Interrupt|Iteration)\w*)`*(?:\s*:\s*(.*))?$"
)
# ":param int name: description"
_SPHINX_FIELD = re.compile(r"^:(param|parameter|arg|type|returns?|rtype|raises?|ivar|vartype)(?: ([^:]*))?:\s*(.*)$")
# The start of a type, but not of a number or a bullet.
_TYPE_WORD = re.compile(r"^[A-Za-z{\[('\"`~:]")

# ":class:`~package.Class`"
_ROLE_MARKUP = re.compile(r":[a-z:]+:`~?([^`<]*?)(?: ?<[^>]*>)?`")
# Markdown's "[text](address)" and reStructuredText's "`text <address>`_".
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)|`([^`<]+) <[^>]*>`_+")
_SPACES = re.compile(r"\s+")


def clean(text: str) -> str:
    """Flatten text to one line, without backticks, roles, link addresses and emphasis."""
    text = _LINK.sub(lambda match: match[1] or match[2], _ROLE_MARKUP.sub(r"\1", text))
    return _SPACES.sub(" ", text.replace("`", "").replace("**", "").replace("*optional*", "optional")).strip()


def parse_docstring(text: str) -> Parsed:
    """Parse a cleaned docstring (`inspect.cleandoc`)."""
    lines = text.split("\n")
    head, sections = _sections(lines)
    fields: list[Field] = []
    for title, body, underlined in sections:
        role = _ROLES.get(title.lower())
        if role is not None:
            fields += _entries(role, body, underlined=underlined)
    head, sphinx = _sphinx(head)
    paragraphs = [part for part in _paragraphs(head) if not _is_code(part)]
    if paragraphs and (_BARE_ENTRY.match(paragraphs[0]) or paragraphs[0].startswith("@")):
        paragraphs = []  # Entries without a heading are neither a summary nor a section.
    summary = clean(paragraphs[0]) if paragraphs else ""
    return Parsed(summary, clean(" ".join(paragraphs[1:])), tuple(filter(_good, [*fields, *sphinx])))


def _sections(lines: list[str]) -> tuple[list[str], list[tuple[str, list[str], bool]]]:
    """Return the lines before the first section title, and (title, dedented lines, underlined) of each section."""
    head: list[str] = []
    sections: list[tuple[str, list[str], bool]] = []
    current = head
    number = 0
    while number < len(lines):
        line = lines[number]
        following = lines[number + 1] if number + 1 < len(lines) else ""
        google = _GOOGLE_TITLE.match(line)  # Such titles have no underline, so only known ones count.
        if line and not line[0].isspace() and _UNDERLINE.match(following) and len(line) < 40:
            current = []
            sections.append((line.strip(), current, True))
            number += 2
            continue
        if google and (google[1].lower() in _ROLES or google[1].lower() in _OTHER_TITLES):
            current = []
            sections.append((google[1], current, False))
        elif sections and not sections[-1][2] and line and not line[0].isspace():
            # A line at the margin ends a Google section; what follows it belongs to no section.
            current = []
            sections.append(("", current, False))
            current.append(line)
        else:
            current.append(line)
        number += 1
    return head, [(title, _dedent(body), underlined) for title, body, underlined in sections]


def _dedent(lines: list[str]) -> list[str]:
    """Remove the common indentation."""
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:] for line in lines]


def _items(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each entry of a section: its line at the margin, and the indented text up to an empty line or a list."""
    title: str | None = None
    body: list[str] = []
    open_text = True
    for line in [*lines, "."]:  # The last line, at the margin, makes the loop yield the last entry.
        if line and not line[0].isspace():
            if title is not None:
                yield title, " ".join(body)
            title, body, open_text = line.strip(), [], True
        elif not line.strip() or line.lstrip().startswith((">>>", "- ", "* ", ".. ", "+ ")):
            open_text = open_text and not body  # Only a description that has begun can end.
        elif open_text:
            body.append(line.strip())


def _entries(role: Role, lines: list[str], *, underlined: bool) -> Iterator[Field]:
    if role == "note":
        for paragraph in _paragraphs(lines):
            if not _is_code(paragraph):
                yield Field("note", "", "", clean(paragraph))
        return
    for title, body in _items(lines):
        if role == "exception":
            match = _EXCEPTION.match(title)
            if match:
                yield Field(role, "", match[1], clean(f"{match[2] or ''} {body}"))
        elif underlined:
            match = _NUMPY_ENTRY.match(title)
            name, type_text = (match[1], match[2]) if match else ("", title) if role == "return" else (title, "")
            yield Field(role, clean(name), clean(type_text), clean(body))
        elif role == "return":
            kind, colon, rest = title.partition(": ")
            typed = colon and len(kind.split()) <= 6 and _TYPE_WORD.match(kind)
            yield Field(role, "", clean(kind.rstrip(":")) if typed else "", clean(f"{rest if typed else title} {body}"))
        else:
            match = _GOOGLE_ENTRY.match(title)
            if match:
                yield Field(role, match[1], clean(match[2] or ""), clean(f"{match[3] or ''} {body}"))


def _sphinx(lines: list[str]) -> tuple[list[str], list[Field]]:
    """Separate a Sphinx field list from the text before it."""
    head: list[str] = []
    entries: list[tuple[str, str, list[str]]] = []
    for line in lines:
        match = _SPHINX_FIELD.match(line)
        if match:
            entries.append((match[1], (match[2] or "").strip(), [match[3]]))
        elif not entries:
            head.append(line)
        elif line.strip() and line[0].isspace():
            entries[-1][2].append(line.strip())
    texts = [(kind, name, clean(" ".join(parts))) for kind, name, parts in entries]
    # Sphinx may give the types of parameters and of the result in fields of their own.
    types = {name: text for kind, name, text in texts if kind in ("type", "vartype")}
    results = next((text for kind, _, text in texts if kind == "rtype"), "")
    fields = []
    for kind, label, text in texts:
        declared, _, name = label.rpartition(" ")
        if kind in ("param", "parameter", "arg", "ivar"):
            fields.append(
                Field("attribute" if kind == "ivar" else "parameter", name, types.get(name, clean(declared)), text)
            )
        elif kind in ("return", "returns"):
            fields.append(Field("return", "", results, text))
        elif kind in ("raise", "raises"):
            fields.append(Field("exception", "", name.rpartition(".")[2], text))
    return head, fields


def _paragraphs(lines: list[str]) -> list[str]:
    """Return the blocks of lines between empty lines."""
    blocks = "\n".join(line.rstrip() for line in lines).split("\n\n")
    return [part for block in blocks if (part := block.strip("\n"))]


def _is_code(paragraph: str) -> bool:
    """Return whether a paragraph is an example, a directive, a list or a table instead of prose."""
    marks = (">>>", ".. ", "- ", "* ", "+-", "===", "```", "|", "In [")
    return paragraph.startswith("    ") or paragraph.lstrip().startswith(marks)


def _good(field: Field) -> bool:
    """Return whether an entry has a description in prose and a name of the usual form."""
    words = field.description.split()
    letters = sum(character.isalpha() or character.isspace() for character in field.description)
    return (
        len(words) >= 3
        and letters >= 0.75 * len(field.description)
        and (field.role in ("return", "note", "exception") or field.name.isidentifier())
        and len(field.type) <= 80
    )
