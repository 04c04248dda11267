"""Outlines of Python sources: all that `ast` needs to find docstrings, without the bodies of functions.

Parsing is most of the work of reading a documentation, and most of a source is the bodies of its functions.
"""

from __future__ import annotations

import re
from functools import cache

# A comment, or a string of any kind, on one line or on several.
_COMMENT_OR_STRING = re.compile(
    rb"""
    \#[^\n]*
    | \"{3} [^"\\]* (?: (?: \\. | "(?!"") ) [^"\\]* )* \"{3}
    | '{3} [^'\\]* (?: (?: \\. | '(?!'') ) [^'\\]* )* '{3}
    | " [^"\\\n]* (?: \\. [^"\\\n]* )* "
    | ' [^'\\\n]* (?: \\. [^'\\\n]* )* '
    """,
    re.DOTALL | re.VERBOSE,
)
_STRING = b"\x01"
"""Byte that replaces each byte of a string, so that nothing in it looks like code or like the end of a line."""
_FUNCTION = re.compile(rb"^([ \t]*)(?:async[ \t]+)?def[ \t]+[^\s(\[]+", re.MULTILINE)
_BRACKET_OR_COLON = re.compile(rb"[()\[\]{}:]")
_FIRST_STRING = re.compile(rb"[\s(\\]*[uUrR]?" + _STRING)


def outline(source: bytes) -> bytes:
    """Return a source whose functions have no parameters, and a body of their docstring alone.

    Classes, decorators and statements outside functions stay as they are. The outline of a valid source either has the
    same docstrings as the source, or is not valid Python. It is invalid if a string or a function is written in a way
    that is not recognised here.
    """
    masked = _COMMENT_OR_STRING.sub(_masked, source)
    pieces: list[bytes] = []
    kept = position = 0
    while function := _FUNCTION.search(masked, position):
        colon = _end_of_signature(masked, function.end())
        line_end = masked.find(b"\n", colon)
        if colon < 0 or line_end < 0:
            break
        if masked[colon:line_end].strip():  # the body is on the same line
            position = line_end
            continue
        end = _indented_at_most(len(function[1])).search(masked, line_end)
        stop = len(source) if end is None else end.start()
        pieces.append(source[kept : function.end()])
        docstring = _FIRST_STRING.match(masked, line_end)
        if docstring is None or docstring.end() > stop:
            pieces.append(b"(): pass\n")
        else:
            after = masked.find(b"\n", docstring.end())
            pieces += [b"():", source[line_end : len(source) if after < 0 else after + 1]]
        kept = position = stop
    pieces.append(source[kept:])
    return b"".join(pieces)


def _masked(match: re.Match[bytes]) -> bytes:
    text = match[0]
    return (b" " if text.startswith(b"#") else _STRING) * len(text)


def _end_of_signature(masked: bytes, start: int) -> int:
    """Return the position after the colon that ends a function's signature; -1 if there is none."""
    depth = 0
    for match in _BRACKET_OR_COLON.finditer(masked, start):
        if match[0] in b"([{":
            depth += 1
        elif match[0] in b")]}":
            depth -= 1
        elif depth == 0:
            return match.end()
    return -1


@cache
def _indented_at_most(width: int) -> re.Pattern[bytes]:
    """Return a pattern of the beginning of a line with code that is indented by at most `width` characters."""
    return re.compile(rb"^[ \t]{0,%d}[^\s]" % width, re.MULTILINE)
