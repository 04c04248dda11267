"""Upload of a model folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from mlmclm.errors import EnvironmentFault, UserError, one_line


def files_to_upload(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file that `push` uploads, by its path within the repository."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def check_repository(repository: str) -> None:
    """Refuse a name that no repository can have.

    Raises:
        UserError: the name is refused; the message says why.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {repository}: {one_line(error)}") from error


def check_access() -> None:
    """Refuse to begin without a token, or offline.

    Raises:
        UserError: there is no access; the message says what to do.
    """
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push-to-hub: the hub is switched off by HF_HUB_OFFLINE; unset it and run again.")
    if huggingface_hub.get_token() is None:
        raise UserError(
            "--push-to-hub: no access token. Make one that may write at https://huggingface.co/settings/tokens and run "
            "`hf auth login`, or set HF_TOKEN."
        )


def push(folder: Path, repository: str, message: str) -> str:
    """Upload a folder as one commit and return the commit's URL; create the repository, private, if there is none.

    Raises:
        UserError: the token may not write there.
        EnvironmentFault: the hub cannot be reached, or fails.
    """
    check_access()
    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            raise UserError(
                f"--push-to-hub {repository}: the hub refuses the access token ({status}); it must be one that may write to "
                f"{repository}. The folder is kept in {folder}."
            ) from error
        raise EnvironmentFault(f"the hub failed ({status}): {error}. The folder is kept in {folder}.") from error
    except (HTTPError, OSError) as error:
        raise EnvironmentFault(
            f"the hub at {constants.ENDPOINT} cannot be reached ({error}). The folder is kept in {folder}; upload it later "
            f"with `hf upload {repository} {folder}`."
        ) from error
    return str(commit.commit_url)
