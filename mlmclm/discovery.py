"""Discovery of classes by their module: to add a class, put a file into the right folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator


def classes_in(package: str) -> Iterator[type]:
    """Yield the classes that the modules of a package define, in the order of the modules' names."""
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{found.name}")
        for value in vars(module).values():
            # Skips classes that the module only imports.
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value
