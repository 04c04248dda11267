"""Taking docstrings apart."""

from __future__ import annotations

import inspect

import pytest

from mlmclm.pydocs.sections import Field, clean, parse_docstring

NUMPYDOC = """
Compute the mean of an array.

The mean is the sum divided by the count.

>>> mean([1, 2])
1.5

Parameters
----------
a, b : array_like of shape (n,)
    Never one name, so left out here.
axis : int or None, optional
    Axis along which to *compute*, see :func:`numpy.sum`.
    Two lines of it.

    A second paragraph is left out.
kind : {'a', 'b'}
    - only a list

Returns
-------
out : ndarray
    The mean of each row.

Raises
------
ValueError
    If the axis is out of bounds.

See Also
--------
median : The middle value instead.

Notes
-----
The mean is sensitive to outliers.
"""

GOOGLE = """
Loads a model.

It may take a while.

Args:
    path (`str` or `os.PathLike`, *optional*, defaults to `None`):
        Where the model lies.
    strict: Whether to refuse other keys, as
        in ``load``.
    **kwargs: Passed on to the reader.

Returns:
    bool: Whether it was loaded.

Raises:
    OSError: If the file is missing.

Example:
    name (str): never a parameter here
"""

SPHINX = """
Sends a request.

:param url: The address to send it to.
:type url: str
:param int timeout: How long to wait
    in seconds.
:returns: The answer of the server.
:rtype: Response
:raises requests.Timeout: If it takes too long to answer.
:raises ValueError: If the address is malformed.
"""


def test_numpydoc_sections_give_names_types_and_first_paragraphs() -> None:
    parsed = parse_docstring(inspect.cleandoc(NUMPYDOC))
    assert parsed.summary == "Compute the mean of an array."
    assert parsed.body == "The mean is the sum divided by the count."
    axis = "Axis along which to *compute*, see numpy.sum. Two lines of it."
    assert parsed.fields == (
        Field("parameter", "axis", "int or None, optional", axis),
        Field("return", "out", "ndarray", "The mean of each row."),
        Field("exception", "", "ValueError", "If the axis is out of bounds."),
        Field("note", "", "", "The mean is sensitive to outliers."),
    )


def test_google_sections_give_names_types_and_descriptions() -> None:
    parsed = parse_docstring(inspect.cleandoc(GOOGLE))
    assert (parsed.summary, parsed.body) == ("Loads a model.", "It may take a while.")
    assert parsed.fields == (
        Field("parameter", "path", "str or os.PathLike, optional, defaults to None", "Where the model lies."),
        Field("parameter", "strict", "", "Whether to refuse other keys, as in load."),
        Field("parameter", "kwargs", "", "Passed on to the reader."),
        Field("return", "", "bool", "Whether it was loaded."),
        Field("exception", "", "OSError", "If the file is missing."),
    )


def test_sphinx_fields_give_names_types_and_descriptions() -> None:
    parsed = parse_docstring(inspect.cleandoc(SPHINX))
    assert parsed.summary == "Sends a request."
    assert parsed.fields == (
        Field("parameter", "url", "str", "The address to send it to."),
        Field("parameter", "timeout", "int", "How long to wait in seconds."),
        Field("return", "", "Response", "The answer of the server."),
        Field("exception", "", "Timeout", "If it takes too long to answer."),
        Field("exception", "", "ValueError", "If the address is malformed."),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see :class:`~a.b.C` and `x`", "see a.b.C and x"),
        ("a [link](http://x) or `another <http://y>`_", "a link or another"),
        ("**bold**  *optional*\n text", "bold optional text"),
    ],
)
def test_markup_is_removed(text: str, expected: str) -> None:
    assert clean(text) == expected


@pytest.mark.parametrize("text", ["", "x (int): A number of things.", ">>> f()\n1", "Parameters\n----------"])
def test_what_has_no_prose_has_no_summary(text: str) -> None:
    assert parse_docstring(text).summary == ""
