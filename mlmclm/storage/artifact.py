"""Artifacts: the things that a store keeps under keys, all found, made, checked and set aside in the same way.

A kind of artifact is a subclass of `Artifact`, in the package that makes it. Its key is a hash of everything that the
content depends on, so an artifact that exists is never made again. A subclass defines where its artifacts lie,
what makes a damaged one again, and what one was made from. Most are folders (`FolderArtifact`); results are files on a disk
or an object store (`sweeps.results_store.StoredResult`), and a corpus is made shard by shard.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from mlmclm.progress import say
from mlmclm.storage.addresses import discard, fetch_folder, leases_of, names_at, send
from mlmclm.storage.checksums import CHECKSUMS, Piece, damage, pieces_in, set_aside, write_checksums
from mlmclm.storage.files import remove_folder, whole_folder
from mlmclm.storage.leases import Leases

KEY = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True)
class Origin:
    """The origin of an artifact, as far as the store records it.

    Attributes:
        facts: what went into the key, by name.
        free: what was recorded but may differ under the same key, such as the number of workers.
        made_by: what made it: version, machine, time.
        needs: the artifacts that it was made from; the store need not have them any more, or at all.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    free: Mapping[str, Any] = field(default_factory=dict)
    made_by: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[Artifact, ...] = ()


@dataclass(frozen=True)
class Artifact(ABC):
    """Something that a store has under a key, or could have.

    Attributes:
        kind: its name in what `mlmclm store` and `mlmclm store why` print.
        part: folder of the store that holds the artifacts of this kind; names of leases begin with it.
        again: what makes a damaged one again, to complete "To make it again: ".
        makes: what a process that holds its lease does, to complete "waiting for process 12 on HOST, which ... it".
    """

    kind: ClassVar[str]
    part: ClassVar[str]
    again: ClassVar[str]
    makes: ClassVar[str] = "makes"

    store: Path
    key: str

    @classmethod
    @abstractmethod
    def all(cls, store: Path) -> Iterator[Self]:
        """Yield the artifacts of this kind in a store, in the order of their keys, intact or damaged."""

    @abstractmethod
    def damage(self, *, read: bool = True) -> str | None:
        """Return what is wrong with it, or None if it exists and is intact.

        Args:
            read: whether to read all files and compare checksums. Otherwise only sizes are compared, which takes no time.
        """

    @abstractmethod
    def files(self) -> Iterator[Piece]:
        """Yield its files, each with its check, damaged ones too."""

    @abstractmethod
    def remove(self) -> None:
        """Delete it. The caller makes sure that nobody uses it.

        Raises:
            EnvironmentFault: it can't be deleted.
        """

    @property
    def lease(self) -> str:
        """Name of the lease to hold while making it."""
        return f"{self.part.replace('/', '-')}-{self.key}"

    @property
    def leases(self) -> Leases:
        """The leases of the store, among them that of this artifact."""
        return leases_of(self.store)

    def leased(
        self, there: Callable[[], bool] = lambda: False, *, title: str | None = None
    ) -> AbstractContextManager[None]:
        """Hold the lease for the duration of the block, after waiting for any other holder.

        Args:
            there: returns whether the artifact has been made meanwhile, so that no lease is needed.
            title: the artifact's name in the message that another process is waited for; by default its key.
        """

        def waiting(holder: str) -> None:
            say(f"{title or self.key}: waiting for {holder}, which {self.makes} it")

        return self.leases.wait(lambda: [] if there() else [self.lease], waiting)

    def origin(self) -> Origin:
        """Read what it was made from; empty where nothing is recorded."""
        return Origin()


class FolderArtifact(Artifact):
    """A folder of the store under a key. It appears complete, with the checksums of its files in `checksums.json`.

    In a store at an address, the folder is uploaded when it is finished, and fetched when it is asked for.

    Attributes:
        remade: what happens to a damaged one, to complete "It is kept as KEY.damaged and ".
        mark: the file by which it is known to be on this machine.
    """

    remade: ClassVar[str] = "made again"
    mark: ClassVar[str] = CHECKSUMS

    @classmethod
    def all(cls, store: Path) -> Iterator[Self]:
        """Yield the artifacts of this kind in a store, in the order of their keys, intact or damaged."""
        sent = {folder.name for folder in names_at(store / cls.part) if KEY.fullmatch(folder.name)}
        for key in sorted(sent | {folder.name for folder in folders_in(store / cls.part)}):
            yield cls(store, key).brought()

    @property
    def folder(self) -> Path:
        """The folder, whether or not it exists."""
        return self.store / self.part / self.key

    def damage(self, *, read: bool = True) -> str | None:
        """Return what is wrong with it, or None if it exists and is intact; see `Artifact.damage`."""
        return damage(self.brought().folder, read=read)

    def files(self) -> Iterator[Piece]:
        """Yield its files, each with its check, damaged ones too."""
        return pieces_in(self.folder, self.kind, self.again)

    def remove(self) -> None:
        """Delete the folder; see `Artifact.remove`."""
        discard(self.folder)
        remove_folder(self.folder)

    def is_here(self) -> bool:
        """Return whether it is on this machine, intact or not, after fetching it from the store's address if need be."""
        return (self.folder / self.mark).is_file() or fetch_folder(self.folder)

    def brought(self) -> Self:
        """Return this artifact, after fetching it if need be (`is_here`)."""
        self.is_here()
        return self

    def send(self) -> None:
        """Send the finished folder to the store's address, if it has one."""
        send(self.folder)

    def find(self, *, read: bool = True, title: str | None = None) -> bool:
        """Return whether it exists and is intact. A damaged one is reported and set aside, and counts as missing.

        Args:
            read: as in `damage`.
            title: the artifact's name in messages; by default its folder.
        """
        if self.brought().folder.is_dir() and self.damage(read=read) is not None:
            with self.leased(title=title or str(self.folder)):
                self.set_aside(read=read, title=title)  # unless another process has made it anew meanwhile
        return self.brought().folder.is_dir()

    def ensure(self, make: Callable[[Path], None], *, read: bool = True, title: str | None = None) -> Path:
        """Return its folder. If it is missing or damaged, make it first, while this process holds the lease.

        Args:
            make: writes the files into the folder that it is given.
            read: as in `damage`.
            title: the artifact's name in the message that another process is waited for; by default its folder.

        Raises:
            EnvironmentFault: the disk is full or not writable. Whatever `make` raises is passed on.
        """

        def intact() -> bool:
            return self.damage(read=read) is None

        with self.leased(intact, title=title or str(self.folder)):
            if not intact():
                self.set_aside(read=read)
            if not intact():  # the store's address may have an intact one
                with whole_folder(self.folder) as temporary:
                    make(temporary)
                    self.seal(temporary)
                self.send()
        return self.folder

    def seal(self, folder: Path) -> None:
        """Write the checksums of a finished folder that is about to get its name."""
        write_checksums(folder)

    def set_aside(self, *, read: bool = True, title: str | None = None) -> None:
        """Rename a damaged folder and say so; do nothing if it isn't there or is intact. The caller holds the lease."""
        reason = self.damage(read=read) if self.folder.is_dir() else None
        if reason is not None:
            aside = set_aside(self.folder).name
            say(f"{title or self.folder} is not used: {reason}. It is kept as {aside} and {self.remade}.")


def folders_in(folder: Path) -> list[Path]:
    """Return the folders that are named by a key, sorted; other folders are set aside, unfinished, or no artifacts."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if KEY.fullmatch(path.name) and path.is_dir())
