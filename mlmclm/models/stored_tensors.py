"""Tensors of safetensors files by name, each read on access: a caller who takes them one by one holds only one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of one or several files whose names begin with a prefix, by the rest of their names.

    Each tensor has its own memory map of the file, which is unmapped when the tensor is freed.
    """

    def __init__(self, paths: Path | Sequence[Path], prefix: str = "") -> None:
        """Read the names.

        Raises:
            OSError, SafetensorError: a file is missing or incomplete.
        """
        self.prefix = prefix
        self.files: dict[str, Path] = {}
        for path in [paths] if isinstance(paths, Path) else paths:
            with safe_open(str(path), "pt") as handle:
                names = list(handle.keys())
            self.files |= {name.removeprefix(prefix): path for name in names if name.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        path = self.files[name]
        # A handle for each tensor: a common one would keep the pages of all of them.
        with safe_open(str(path), "pt") as handle:
            tensor: Tensor = handle.get_tensor(self.prefix + name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)
