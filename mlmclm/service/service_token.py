"""The token of a service: which one a new service requires, and whether its file can be used."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from mlmclm.cluster.ray_cluster import token_path
from mlmclm.errors import UserError
from mlmclm.storage.home import find_home

RESTART = "`mlmclm down` ends what is left of it, and `mlmclm up` starts it again."
"""Advice for an incomplete service."""


def new_token(store: Path, environment: Mapping[str, str]) -> str:
    """Return the token for a new service: the user's (from the environment or the home folder), the store's, or a new one.

    Raises:
        UserError: the existing token can't be used, or tokens are turned off.
    """
    mode = environment.get("RAY_AUTH_MODE") or "token"
    if mode.lower() != "token":
        raise UserError(f"RAY_AUTH_MODE={mode}: the service requires a token from everyone. Unset the variable.")
    kept = read_token(token_path(store)) if token_path(store).exists() else None
    if environment.get("RAY_AUTH_TOKEN"):
        return environment["RAY_AUTH_TOKEN"].strip()
    if environment.get("RAY_AUTH_TOKEN_PATH"):
        return read_token(Path(environment["RAY_AUTH_TOKEN_PATH"]))
    home = find_home()
    if home is not None and (home / ".ray" / "auth_token").exists():
        return read_token(home / ".ray" / "auth_token")
    return kept or secrets.token_hex(32)


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        UserError: it is missing, empty, or readable by other users.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{path}: the token can't be read ({error.strerror}). {RESTART}") from error
    if mode & 0o077:
        raise UserError(
            f"{path}: other users may read this token (mode {mode & 0o777:o}), with which they can run programs as you. "
            f"Run `chmod 600 {shlex.quote(str(path))}`, or delete the file to get a new token from the next `mlmclm up`."
        )
    if not text:
        raise UserError(f"{path}: this file has no token. Delete it. {RESTART}")
    return text
