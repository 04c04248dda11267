"""Tensors of a safetensors file by name, each read when it is asked for: whoever takes them up one by one holds one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a file whose names begin with a prefix, by the rest of their names.

    A tensor lies in pages of the file that are mapped for it alone, and go with it.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        """Reads the names.

        Raises:
            OSError, SafetensorError: no such file, or not a whole one.
        """
        self.path, self.prefix = path, prefix
        with safe_open(str(path), "pt") as handle:
            names = list(handle.keys())
        self.names = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        with safe_open(str(self.path), "pt") as handle:
            tensor: Tensor = handle.get_tensor(self.prefix + name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
