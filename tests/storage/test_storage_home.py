"""Nothing needs a home folder or a user's name: a container's process may have neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlmclm.cluster import ray_cluster
from mlmclm.errors import UserError
from mlmclm.storage.files import expanded, places_of
from mlmclm.storage.home import find_home, some_home

UNKNOWN = 54321
UNSHARE = ["unshare", "--user", f"--map-user={UNKNOWN}"]
VERB = """
import getpass, sys
from pathlib import Path
from mlmclm.cli.main import app, main

@app.command("look")
def look(store: Path):
    import mlflow
    from mlmclm.cluster.ray_cluster import _own_token
    from ray.tune.execution.cluster_info import _is_ray_cluster
    _is_ray_cluster()
    assert _own_token(store) == store.resolve() / "ray" / "auth_token"
    assert Path.home().stat().st_mode & 0o077 == 0
    print(Path.home(), getpass.getuser())

main(["look", sys.argv[1]])
"""


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def user() -> str:
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.setattr("pathlib.Path.home", home)
    monkeypatch.setattr("getpass.getuser", user)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("USER", raising=False)


def test_a_command_of_an_unknown_user_without_home_gets_a_temporary_one_and_is_told(tmp_path: Path) -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs user namespaces (unshare --user), which this system does not allow")
    names = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
    environment = {
        name: value for name, value in os.environ.items() if name not in names and not name.startswith("RAY_AUTH")
    }
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", VERB, str(tmp_path)],
        env={**environment, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    home, user = done.stdout.split()
    assert (Path(home).parent, user) == (tmp_path, f"uid{UNKNOWN}")
    assert not Path(home).exists()
    assert f"no user has the id {UNKNOWN}" in done.stderr and "Set HOME" in done.stderr


def test_without_a_home_a_path_that_begins_in_it_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expanded("~/text") == Path.home() / "text"
    for path in ("~no-such-user/text", Path("~no-such-user")):
        with pytest.raises(
            UserError, match=r"^~no-such-user.*: there is no home folder '~no-such-user'; write the path"
        ):
            places_of(path, None)


def test_a_home_folder_and_a_user_s_name_are_found_inside_the_block_only(homeless: None) -> None:
    assert find_home() is None
    with some_home():
        assert (os.environ["USER"], Path(os.environ["HOME"]).is_dir()) == (f"uid{os.getuid()}", True)
    assert not {"HOME", "USER"} & os.environ.keys()


def test_tokens_of_a_home_or_store_that_this_user_may_not_read_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker run --user 1000` with another user's HOME; a store that two users share."""
    home, store = tmp_path / "home", tmp_path / "store"
    closed = (home / ".ray" / "auth_token", store / "ray" / "auth_token")
    for path in closed:
        path.parent.mkdir(parents=True)
        path.write_text("another's\n")
    monkeypatch.setenv("HOME", str(home))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(ray_cluster, "_chosen", {})

    read = Path.read_text

    def refuse(path: Path, *arguments: object, **options: object) -> str:
        if path in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refuse)
        assert ray_cluster._own_token(store) == closed[1]
    assert closed[1].read_text().strip() == os.environ["RAY_AUTH_TOKEN"] != "another's"
    assert closed[1].stat().st_mode & 0o077 == 0
