"""Where documents lie in packed blocks: each ends with the token that `prepare` writes after it, or where its block does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def document_lengths(tokens: NDArray[Any], separator: int) -> NDArray[np.int64]:
    """Lengths of the documents, or the parts of documents, in blocks: int64 [documents], one block after the other.

    Args:
        tokens: [blocks, length].
        separator: the token that a document ends with (EOS); it belongs to the document.
    """
    ends = tokens == separator
    ends[:, -1] = True
    return np.diff(np.flatnonzero(ends) + 1, prepend=0)
