"""Classes found by where they are defined: a file in the right folder is all that a new one needs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator


def classes_in(package: str) -> Iterator[type]:
    """Yield the classes that the files of a package define, in the order of the files' names."""
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{found.name}")
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value
