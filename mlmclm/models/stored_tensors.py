"""Tensors of a safetensors file by name, each read on access: a caller who takes them one by one holds only one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a file whose names begin with a prefix, by the rest of their names.

    Each tensor maps the file's pages for itself, and they are unmapped when it goes.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        """Read the names.

        Raises:
            OSError, SafetensorError: the file is missing or incomplete.
        """
        self.path, self.prefix = path, prefix
        with safe_open(str(path), "pt") as handle:
            names = list(handle.keys())
        self.names = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        # A handle for each tensor: a common one would keep the pages of all of them.
        with safe_open(str(self.path), "pt") as handle:
            tensor: Tensor = handle.get_tensor(self.prefix + name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
