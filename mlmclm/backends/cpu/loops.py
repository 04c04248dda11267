"""Compile loops over arrays for this CPU with numba, and cache the compiled code on disk.

The cache is a folder named by a hash of all that compiled code is made of: the sources in this folder, the versions of
numba, LLVM and Python, and the CPU. So every environment with this version on a machine finds it, wherever it is
installed, and no change of a source goes unnoticed (numba itself looks only at the file of the function that is called,
not at those of the functions inlined into it). The folder is in `NUMBA_CACHE_DIR`, else in the user's cache folder,
else in the system's temporary folder.

Some loops can't be compiled on some machines, because of a fault of LLVM or of what a virtual machine reports about its
CPU. Such a fault may end the process, so `prepare` (`mlmclm.backends.cpu.ready`) tries them in another one. If they
fail, this process computes with torch's operations instead (`mlmclm.backends.choice.give_up`).
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt
from llvmlite import binding
from numba import config, njit
from numba.core.codegen import get_host_cpu_features

from mlmclm.storage.files import hash_file, stable_hash

Array = npt.NDArray[Any]


def target_features() -> frozenset[str]:
    """Return the CPU features that LLVM compiles for, by its names: this CPU's, or those of `NUMBA_CPU_FEATURES`."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))


# Use 512-bit vectors on CPUs with tiles. LLVM prefers 256 bits for some of them, because wider vectors lower the
# frequency of other CPUs.
if config.CPU_FEATURES is None and "amx-tile" in target_features():
    config.CPU_FEATURES = get_host_cpu_features() + ",-prefer-256-bit"


def compiled(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: numba's `njit`, with compiled code kept on disk if some folder for it is writable."""

    def decorate(function: Callable[..., Any]) -> Any:
        # nogil: `over_threads` runs loops on Python's threads. error_model: a division by 0 gives inf or NaN instead of
        # an error.
        options: dict[str, Any] = {"fastmath": flags, "nogil": True, "error_model": "numpy"}
        with _own_place():
            try:
                return njit(cache=True, **options)(function)
            except RuntimeError:  # numba finds no writable folder
                return njit(**options)(function)

    return decorate


@lru_cache
def cache_folder() -> Path | None:
    """Return the folder of compiled loops; None if none can be written to."""
    name = f"mlmclm-loops-{_stamp()[:20]}"
    if config.CACHE_DIR:
        return _writable(Path(config.CACHE_DIR) / name)
    # Not absolute if the user has no home.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
    own = _writable(cache / "mlmclm" / name) if cache.is_absolute() else None
    if own is not None:
        return own
    # Another user may have put a folder of this name there, and its code would be run.
    temporary = _writable(Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}")
    if temporary is None:
        return None
    status = temporary.lstat()
    return temporary if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None


@lru_cache
def _stamp() -> str:
    """Return a hash of all that compiled code is made of, except the files of loops that are defined elsewhere."""
    here = Path(__file__).parent
    return stable_hash(
        {
            "sources": [hash_file(path) for path in sorted(here.glob("*.py"))],
            "versions": [version("numba"), version("llvmlite"), platform.python_version_tuple()[:2]],
            "cpu": [config.CPU_NAME or binding.get_host_cpu_name(), sorted(target_features()), config.CPU_FEATURES],
        }
    )


def _writable(folder: Path) -> Path | None:
    """Return the folder, created for its owner alone if need be; None if it can't be written to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


class CacheLocator:
    """Location of a function's compiled code, with the methods that numba expects of `NUMBA_CACHE_LOCATOR_CLASSES`."""

    def __init__(self, folder: Path, source: Path, line: int) -> None:
        self._folder, self._source, self._line = folder, source, line
        self._py_file = str(source)  # numba's warnings name it

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> Self | None:
        """Return a locator; None if no cache folder can be written to."""
        folder = cache_folder()
        return None if folder is None else cls(folder, Path(file), function.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        """Return a stamp that must match for cached code to be used.

        It includes the function's own file, which may be elsewhere.
        """
        return _stamp() + hash_file(self._source)

    def get_disambiguator(self) -> str:
        """Return the line, which tells apart functions of one name in one file."""
        return str(self._line)


@contextmanager
def _own_place() -> Iterator[None]:
    """Make numba use `CacheLocator` for functions declared meanwhile, unless the user has chosen another locator."""
    if config.CACHE_LOCATOR_CLASSES:
        yield
        return
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{CacheLocator.__name__}"
    try:
        yield
    finally:
        config.CACHE_LOCATOR_CLASSES = ""
