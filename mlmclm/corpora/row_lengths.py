"""Boundaries of documents in packed blocks: a document ends with its EOS, or at the end of its block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def document_lengths(tokens: NDArray[Any], separator: int) -> NDArray[np.int64]:
    """Return the lengths of the documents, or parts of documents, in tokens [blocks, length]: int64 [documents].

    The separator (EOS) is the last token of every document and counts as part of it.
    """
    ends = tokens == separator
    ends[:, -1] = True
    return np.diff(np.flatnonzero(ends) + 1, prepend=0)


def row_lengths(tokens: NDArray[Any], end: int) -> NDArray[np.int64]:
    """Return the lengths of chunks [rows, length] up to their `end` (EOS), without filling: int64 [rows]."""
    return np.argmax(tokens == end, axis=1) + 1
