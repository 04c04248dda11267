"""Upload of a model folder, or of a model's revisions, to the Hugging Face Hub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from mlmclm.errors import EnvironmentFault, UserError, one_line
from mlmclm.models.folder import PICKLES
from mlmclm.models.sources import WEIGHTS
from mlmclm.progress import say
from mlmclm.storage.checksums import CHECKSUMS
from mlmclm.storage.files import read_json

WEIGHT_SUFFIXES = (".safetensors", *PICKLES, ".h5", ".msgpack", ".onnx", ".gguf")
DECODER = "decoder/*"
"""Pattern of the files in a model's folder that form a model of their own, the decoder."""
LONGEST_TITLE = 59
"""Maximum number of characters in a collection's title."""
BRANCH = "revisions"
"""Branch of the commits that the tags of revisions point to."""


def files_to_upload(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file of a model that `push` uploads, by name."""
    files = ((path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return {name: path.stat().st_size for name, path in files if not fnmatch(name, DECODER)}


def check_repository(repository: str, *, option: str = "--push-to-hub") -> None:
    """Raise a `UserError` that says why if no repository can have this name."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"{option} {repository}: {one_line(error)}") from error


def check_access() -> None:
    """Raise a `UserError` that says what to do if there is no access token, or the hub is switched off."""
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push-to-hub: the hub is switched off by HF_HUB_OFFLINE; unset it and run again.")
    if huggingface_hub.get_token() is None:
        raise UserError(
            "--push-to-hub: no access token. Make one that may write at https://huggingface.co/settings/tokens and run "
            "`hf auth login`, or set HF_TOKEN."
        )


def push(folder: Path, repository: str, message: str, *, data_set: bool = False) -> str:
    """Upload a folder's files as one commit and return its URL; create the repository, private, if there is none.

    Args:
        data_set: whether the folder is a data set; else it is a model, whose decoder is not uploaded (it is a model of its own).

    Raises:
        UserError: the token may not write there.
        EnvironmentFault: the hub cannot be reached, or fails.
    """
    check_access()
    hub = huggingface_hub.HfApi()
    kind, left_out = ("dataset", None) if data_set else ("model", DECODER)
    how = "--repo-type dataset" if data_set else f"--exclude '{DECODER}'"
    with _answers(
        repository, f"The folder is kept in {folder}; upload it later with `hf upload {repository} {folder} {how}`."
    ):
        hub.create_repo(repository, repo_type=kind, private=True, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository, repo_type=kind, folder_path=folder, commit_message=message, ignore_patterns=left_out
        )
    return str(commit.commit_url)


def add_to_collection(repository: str, title: str) -> None:
    """Add a model to its owner's collection of this title, which is created as private; a token may lack the right to do so."""
    hub, (owner, _, name) = huggingface_hub.HfApi(), repository.rpartition("/")
    try:
        owner = owner or hub.whoami()["name"]
        collection = hub.create_collection(title[:LONGEST_TITLE], namespace=owner, private=True, exists_ok=True)
        hub.add_collection_item(collection.slug, f"{owner}/{name}", "model", exists_ok=True)
    except (HfHubHTTPError, HTTPError, OSError) as error:
        say(f"{repository} is not in the collection {title!r}: {one_line(error, 300)}")


def push_revisions(
    revisions: Mapping[str, Path], repository: str, message: str, observe: Callable[[str, int], None]
) -> list[str]:
    """Upload folders as commits with a tag each, and the last one as `main` too; return the tags that were uploaded.

    A tag that the repository has with the same weights stays as it is. The commits of tags are on the branch
    `revisions`, so that `main` is never an earlier step. They have the folders' files only.

    Args:
        revisions: tag -> folder (`hub_cache.CachedRepository.snapshot`), in the order of training.
        observe: called with each tag and the number of those before it.

    Raises:
        UserError: the token may not write there, or the repository's tags or `main` have other weights, or tags another
            configuration.
        EnvironmentFault: the hub cannot be reached, or fails.
    """
    check_access()
    hub = huggingface_hub.HfApi()
    uploaded, folders = [], list(revisions.values())
    with _answers(repository, "What was uploaded stays: run the same command again."):
        hub.create_repo(repository, private=True, exist_ok=True)
        existing = {reference.name for reference in hub.list_repo_refs(repository).tags}
        # All are compared before any is uploaded, so that a repository of another model stays as it is.
        for tag, folder in revisions.items():
            if tag in existing and not _has(hub, repository, tag, folder, (WEIGHTS, "config.json")):
                raise UserError(
                    f"--push-to-hub {repository}: its revision {tag!r} has the weights of another model or training. Give another repository."
                )
        # In reverse order, because `main` mostly has the last folder's weights.
        ours = (_has(hub, repository, "main", folder, (WEIGHTS,)) for folder in reversed(folders))
        if any(name.endswith(WEIGHT_SUFFIXES) for name in hub.list_repo_files(repository)) and not any(ours):
            raise UserError(
                f"--push-to-hub {repository}: its branch 'main' has the weights of another model, or of a later step. Give another repository."
            )
        hub.create_branch(repository, branch=BRANCH, exist_ok=True)
        for number, (tag, folder) in enumerate(revisions.items()):
            observe(tag, number)
            if tag in existing:
                continue
            commit = hub.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=f"{message}: {tag}",
                revision=BRANCH,
                delete_patterns="*",  # what is left of `main` or of another step
            )
            hub.create_tag(repository, tag=tag, revision=commit.oid)
            uploaded.append(tag)
        names = [name for name in files_to_upload(folders[-1]) if name != "README.md"]
        if not _has(hub, repository, "main", folders[-1], names):
            hub.upload_folder(repo_id=repository, folder_path=folders[-1], commit_message=message)
    return uploaded


def _has(hub: huggingface_hub.HfApi, repository: str, revision: str, folder: Path, names: Sequence[str]) -> bool:
    """Return whether a revision has these files with the same content as a folder, which has checksums."""
    sums = read_json(folder / CHECKSUMS)
    by_path = {info.path: info for info in hub.get_paths_info(repository, list(names), revision=revision)}
    for name in names:
        info = by_path.get(name)
        if not isinstance(info, huggingface_hub.hf_api.RepoFile):
            return False
        if info.lfs is not None:  # large files, as all weights are; git stores only this hash of them
            same = name in sums and info.lfs.sha256 == sums[name]["sha256"]
        else:
            content = (folder / name).read_bytes()
            git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
            same = info.blob_id == git.hexdigest()
        if not same:
            return False
    return True


@contextmanager
def _answers(repository: str, kept: str) -> Iterator[None]:
    """Turn the hub's failures into a `UserError` or an `EnvironmentFault` that ends with `kept`, a sentence on what remains."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            raise UserError(
                f"--push-to-hub {repository}: the hub refuses the access token ({status}); it must be one that may write to "
                f"{repository}. {kept}"
            ) from error
        raise EnvironmentFault(f"the hub failed ({status}): {error}. {kept}") from error
    except (HTTPError, OSError) as error:
        raise EnvironmentFault(f"the hub at {constants.ENDPOINT} cannot be reached ({error}). {kept}") from error
