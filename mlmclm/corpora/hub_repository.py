"""Repositories of the Hugging Face Hub: their commits, which a store pins, and the errors of requests for them.

    hub/KIND-ID.json      the commit of a name and revision when this store first asked the Hub

A branch and a tag can move. The same key would then mean another text or tokenizer, so every later run asks for the
pinned commit. After the file is deleted, the store pins the current commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mlmclm.errors import EnvironmentFault, MlmclmError, UserError, meant, one_line
from mlmclm.storage.addresses import is_local, send_file
from mlmclm.storage.checksums import read_sealed, write_sealed
from mlmclm.storage.files import check_folder, stable_hash

COMMIT = re.compile(r"[0-9a-f]{40}")
PATIENCE = 10.0
"""Seconds in which the Hub must answer a request about a repository."""
PINS = "hub"
"""The store's folder of commits."""


@dataclass(frozen=True)
class HubRepository:
    """A model or data set of the Hub, by its name and revision."""

    name: str
    kind: Literal["model", "dataset"]
    revision: str | None = None
    """A branch, a tag or a commit; by default the branch `main`."""
    where: str = ""
    """Beginning of error messages, such as the key of a study file."""
    instead: str = "or give a local folder"
    """End of error messages: what else would help."""
    local: bool = False
    """Whether the name is more likely that of a missing local folder."""

    def commit(self) -> str:
        """Ask the Hub which commit the revision is.

        Raises:
            UserError: there is no such repository or revision, or this user may not read it.
            EnvironmentFault: the Hub cannot be reached, or is switched off.
        """
        from huggingface_hub import HfApi

        try:
            api = HfApi()
            info = api.repo_info(self.name, repo_type=self.kind, revision=self.revision, timeout=PATIENCE)
            api.auth_check(self.name, repo_type=self.kind)  # `repo_info` answers for gated repositories too
        except Exception as error:  # including those of its HTTP library
            raise self._named(error) from error
        assert info.sha is not None
        return info.sha

    def pinned(self, store: Path) -> str | None:
        """Return the commit that the store has pinned; None if it never asked."""
        if self.revision is not None and COMMIT.fullmatch(self.revision):
            return self.revision
        file = self._pin(store)
        if not is_local(file):
            return None
        return str(read_sealed(file, f"Delete it to take the current commit of {self.name}.")["commit"])

    def pin(self, store: Path) -> str:
        """Return the commit that the store has pinned; pin the current one if it never asked.

        Raises what `commit` does.
        """
        check_folder(store)  # first, as a commit could not be recorded without it
        commit = self.pinned(store)
        if commit is None:
            commit, file = self.commit(), self._pin(store)
            noted = {"kind": self.kind, "name": self.name, "revision": self.revision, "commit": commit}
            write_sealed(file, {**noted, "read": f"{datetime.now(UTC):%Y-%m-%d}"})
            send_file(file)
        return commit

    def trouble(self, error: BaseException) -> MlmclmError:
        """Return the error for something that one of the Hub's libraries could not load.

        These libraries wrap errors in different ways, so the Hub is asked once more for the cause.
        """
        try:
            self.commit()
        except MlmclmError as fault:
            return fault
        problem = f"{self._begin}{self._shown} cannot be loaded ({type(error).__name__}: {one_line(error, 300)})"
        if isinstance(error, (ValueError, FileNotFoundError, RuntimeError, ImportError)):
            return UserError(f"{problem}. See what it has on {self._page}, {self.instead}.")
        return EnvironmentFault(f"{problem}. Run the same command again, {self.instead}.")

    def _pin(self, store: Path) -> Path:
        return store / PINS / f"{self.kind}-{stable_hash([self.name, self.revision])[:16]}.json"

    @property
    def _begin(self) -> str:
        return f"{self.where}: " if self.where else ""

    @property
    def _title(self) -> str:
        return "data set" if self.kind == "dataset" else self.kind

    @property
    def _shown(self) -> str:
        return f"the {self._title} {self.name!r} of the Hugging Face Hub"

    @cached_property
    def _page(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    def _named(self, error: Exception) -> MlmclmError:
        """Return the project's error for an error response of the Hub, or for no response."""
        import huggingface_hub
        from huggingface_hub import constants, errors

        begin, log_in = self._begin, "run `hf auth login`, or set HF_TOKEN"
        at = f" at {self.revision}" if self.revision is not None else ""
        if constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
            return self._fault(
                f"{begin}{self._shown}{at} is not in the cache, and the Hub is switched off by HF_HUB_OFFLINE. Unset it and run again "
                f"where there is a network, {self.instead}."
            )
        token = huggingface_hub.get_token()
        if isinstance(error, errors.GatedRepoError):
            if token is None:
                return UserError(
                    f"{begin}{self._shown} is gated, and there is no access token. Ask for access on {self._page}, then {log_in}."
                )
            return UserError(
                f"{begin}{self._shown} is gated, and the account of this access token has no access. Ask for it on {self._page}, "
                f"or use another account's token: {log_in}."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return UserError(f"{begin}{self._shown} has no revision {self.revision!r}.{self._revisions()}")
        if isinstance(error, errors.HFValidationError):
            return UserError(f"{begin}{self.name!r} is no name on the Hugging Face Hub: {one_line(error)}")
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and token is None):
            seen = f"If it is private, {log_in}" if token is None else "It may be private to another account"
            return UserError(
                f"{begin}the Hugging Face Hub has no {self._title} {self.name!r} that it shows to you.{self._nearest()} {seen}; "
                f"{self.instead}."
            )
        if status in (401, 403):
            return UserError(f"{begin}the Hugging Face Hub refuses the access token. Make another one: {log_in}.")
        return self._fault(
            f"{begin}{self._shown} cannot be loaded: {constants.ENDPOINT} cannot be reached "
            f"({type(error).__name__}: {one_line(error, 300)}). Check the network, {self.instead}."
        )

    @property
    def _fault(self) -> type[MlmclmError]:
        """The error if the Hub cannot be asked."""
        return UserError if self.local else EnvironmentFault

    def _revisions(self) -> str:
        """Return the sentences that name its revisions; empty if the Hub doesn't say."""
        from huggingface_hub import HfApi

        with suppress(Exception):
            refs = HfApi().list_repo_refs(self.name, repo_type=self.kind)
            names = [ref.name for ref in (*refs.branches, *refs.tags)]
            return f"{meant(str(self.revision), names)} It has: {', '.join(names[:20])}."
        return ""

    def _nearest(self) -> str:
        """Return the question whether another name was meant; empty if none is near, or the Hub doesn't say."""
        from huggingface_hub import HfApi

        owner, _, title = self.name.rpartition("/")
        api = HfApi()
        search: Callable[..., Iterable[Any]] = api.list_datasets if self.kind == "dataset" else api.list_models
        with suppress(Exception):
            for query in (*([{"author": owner}] if owner else ()), {"search": title}):
                if question := meant(self.name, [hit.id for hit in search(**query, limit=200)]):
                    return question
        return ""


def error_with_nearest(error: object, *requested: str | None) -> str:
    """Return `datasets`' error about a configuration or split on one line, with the nearest of the names that it lists."""
    text = one_line(error, 600).rstrip(".")
    names = re.findall(r"'([^']+)'", text.rpartition("[")[2])
    wrong = [value for value in requested if value is not None and value not in names]
    return f"{text}.{meant(wrong[0], names) if wrong else ''}"


def load_at_commit(
    name: str,
    config_name: str | None,
    *,
    split: str,
    revision: str | None,
    streaming: bool = False,
    data_dir: str | None = None,
) -> Any:
    """Return a split of a data set as `datasets.load_dataset` does, but never of another commit than the given one.

    If the Hub cannot be reached or doesn't show the data set, `datasets` uses the commit that its cache got last, whatever
    the `revision` is.

    Raises:
        FileNotFoundError: the cache has other commits only. Otherwise what `datasets` raises.
    """
    import datasets

    where: dict[str, Any] = {"revision": revision, "data_dir": data_dir}
    pinned = revision is not None and COMMIT.fullmatch(revision) is not None
    if streaming:
        builder = datasets.load_dataset_builder(name, config_name, **where)
        if pinned and builder.hash != revision:
            raise _other_commit(name, str(builder.hash), str(revision))
        return builder.as_streaming_dataset(split=split)
    data = datasets.load_dataset(name, config_name, split=split, **where)
    for folder in {Path(file["filename"]).parent for file in data.cache_files} if pinned else ():
        if folder.name != revision:
            return _from_cache(name, folder, str(revision), split)
    return data


def _from_cache(name: str, folder: Path, commit: str, split: str) -> Any:
    """Read a split at `commit` from the cache, where it lies beside `folder`, that of another commit."""
    from datasets.packaged_modules.cache.cache import Cache  # what `load_dataset` reads its cache with

    if not folder.with_name(commit).is_dir():
        raise _other_commit(name, folder.name, commit)
    *_, config_name, version, _ = folder.parts
    data_set = name.rpartition("/")[2]
    builder = Cache(repo_id=name, dataset_name=data_set, config_name=config_name, version=version, hash=commit)
    return builder.as_dataset(split=split)


def _other_commit(name: str, cached: str, wanted: str) -> FileNotFoundError:
    return FileNotFoundError(f"the cache has the commit {cached} of {name}, not {wanted}")


HUB_DATA = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""NAME or OWNER/NAME."""


def check_hub_data(name: str, where: str) -> None:
    """Check that `datasets.load_dataset` will look on the hub for a data set, and nowhere else.

    `load_dataset` also reads a folder of this name in the working directory, and takes words such as `csv` or `text` for
    the files of the working directory.

    Raises:
        UserError: the name is not one of the hub, or means local files; the message begins with `where`.
    """
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES  # the list that `load_dataset` goes by

    if HUB_DATA.fullmatch(name) is None:
        raise UserError(f"{where}: {name!r} is not the name of a data set on the Hub, which is NAME or OWNER/NAME.")
    if name in _PACKAGED_DATASETS_MODULES:
        raise UserError(
            f"{where}: {name!r} stands for local files, not for a data set on the Hub, which is NAME or OWNER/NAME. Give a local "
            "data set by its folder."
        )
    if Path(name).exists():
        raise UserError(
            f"{where}: {name!r} would be read from {Path(name).resolve()} and not from the Hub. Run this in another folder; or give "
            "the folder that holds the local data set as --data."
        )
