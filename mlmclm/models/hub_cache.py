"""Repositories in the layout of the Hugging Face Hub's cache, from which `from_pretrained` reads without a network.

    FOLDER/models--OWNER--NAME/blobs/SHA256              content of the files, each once
                               snapshots/COMMIT/PATH     links to it
                               refs/TAG                  a tag's commit; `main` is what is loaded without `revision`

    AutoModel.from_pretrained("OWNER/NAME", revision=TAG, cache_dir=FOLDER)

A commit is a hash of paths and contents, so the same files are the same commit everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from mlmclm.corpora.notes import damage_of_export
from mlmclm.errors import UserError
from mlmclm.storage.checksums import has_checksums
from mlmclm.storage.files import disk_fault, hash_file, stable_hash, whole_folder, write_atomic


class CachedRepository:
    """One repository in such a cache folder."""

    def __init__(self, cache: Path, repository: str) -> None:
        """Name a repository; nothing is written yet. Raise a `UserError` if the name is not OWNER/NAME."""
        from mlmclm.models.hub import check_repository

        check_repository(repository, option="--repository")
        if "/" not in repository:
            raise UserError(f"--repository {repository}: expected OWNER/NAME")
        self.name = repository
        self.folder = cache / f"models--{repository.replace('/', '--')}"

    def snapshot(self, tag: str) -> Path | None:
        """Return the folder of a tag's commit; None if there is no such tag, or the commit's files are incomplete."""
        ref = self.folder / "refs" / tag
        if not ref.is_file():
            return None
        folder = self.folder / "snapshots" / ref.read_text(encoding="utf-8")
        intact = (folder / "README.md").is_file() and has_checksums(folder) and damage_of_export(folder) is None
        return folder if intact else None

    def commit(self, source: Path, files: Iterable[Path]) -> str:
        """Add files as a commit and return it. The files, on the same file system, are linked and not copied.

        Raises:
            EnvironmentFault: the disk is full or not writable.
        """
        contents = {path.relative_to(source).as_posix(): hash_file(path) for path in files}
        commit = stable_hash(contents)[:40]
        for name, content in contents.items():
            self._add(source / name, content)
        folder = self.folder / "snapshots" / commit
        if folder.is_dir():
            _link(folder, {name: content for name, content in contents.items() if not (folder / name).is_file()})
        else:
            with whole_folder(folder) as temporary:
                _link(temporary, contents)
        return commit

    def tag(self, tag: str, commit: str) -> None:
        """Let a tag point to a commit."""
        ref = self.folder / "refs" / tag
        if not ref.is_file() or ref.read_text(encoding="utf-8") != commit:
            write_atomic(ref, commit)

    def _add(self, path: Path, content: str) -> None:
        """Link a file into `blobs`, under the hash of its content, unless it is there intact."""
        blob = self.folder / "blobs" / content
        if blob.is_file() and hash_file(blob) == content:
            return
        try:
            blob.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
            blob.unlink(missing_ok=True)
            blob.hardlink_to(path)
        except OSError as error:
            raise disk_fault(error, blob, choose="another folder with --to") from error


def _link(snapshot: Path, contents: Mapping[str, str]) -> None:
    """Link a snapshot's files, given by path, to their contents."""
    for name, content in contents.items():
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path(*[".."] * (name.count("/") + 2), "blobs", content))


def repositories_of(repository: str, *, decoder: bool) -> tuple[str, ...]:
    """Return the repositories of a published model: `repository`; with `decoder`, it has the decoder, and a second the encoder.

    One repository would load as one of the two only, because transformers looks for a model at its root.
    """
    return (repository, f"{repository}-encoder") if decoder else (repository,)
