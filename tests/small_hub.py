"""A stand-in for the Hugging Face Hub: repositories in memory, behind the requests of huggingface_hub's uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs


@dataclass
class Repository:
    """Branches and tags as commits, and commits as files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0": {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0"})
    tags: dict[str, str] = field(default_factory=dict)

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[{**self.branches, **self.tags}.get(revision, revision)]


@dataclass
class Hub:
    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """Path and first line of each request with a body."""
    commits_left: int = 10**6
    """Commits that are taken before the server fails."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self._chunks()
        if self.path == "/api/repos/create":
            made = json.loads(body)
            self.hub.asked.append((self.path, made))
            name = f"{made.get('organization') or 'me'}/{made['name']}"
            self.hub.repositories.setdefault(name, Repository())
            return self._answer({"url": f"{self.hub.address}/{name}", "name": name})
        if not self.path.startswith(("/api/models/", "/api/datasets/")):  # the check of a card's front matter
            return self._answer({})
        *_, owner, model, what, revision = self.path.split("/")
        repository = self.hub.repositories[f"{owner}/{model}"]
        if what == "paths-info":
            files = repository.files(revision)
            paths = [path for path in parse_qs(body.decode())["paths"] if path in files]
            return self._answer([_info(path, files[path]) for path in paths])
        lines = [json.loads(line) for line in body.splitlines() if line]
        self.hub.asked.append((self.path, lines[0]))
        if what == "preupload":
            return self._answer({"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in lines[0]["files"]]})  # fmt: skip
        if what == "branch":
            if revision in repository.branches:
                return self._answer({"error": "there"}, status=409)
            repository.branches[revision] = repository.branches["main"]
            return self._answer({})
        if what == "tag":
            assert lines[0]["tag"] not in repository.tags
            repository.tags[lines[0]["tag"]] = revision
            return self._answer({})
        assert what == "commit", self.path
        if not self.hub.commits_left:
            return self._answer({"error": "no more"}, status=400)  # at 500 the library tries again for long
        self.hub.commits_left -= 1
        new = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"}  # fmt: skip
        gone = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
        commit = str(len(repository.commits))
        kept = {path: content for path, content in repository.files(revision).items() if path not in gone}
        repository.commits[commit] = {**kept, **new}
        repository.branches[revision] = commit
        address = f"{self.hub.address}/{owner}/{model}/commit/{commit}"
        return self._answer({"commitUrl": address, "commitOid": commit, "success": True})

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            *_, owner, model, _, revision = self.path.partition("?")[0].split("/")
            files = self.hub.repositories[f"{owner}/{model}"].files(revision)
            return self._answer([_info(path, content) for path, content in files.items()])
        if self.path.startswith("/api/datasets/"):  # it has none
            return self._answer({"error": "not there"}, status=404)
        if not self.path.endswith("/refs"):
            return self._answer({"id": "me/model", "sha": "0", "siblings": [], "name": "me"})
        *_, owner, model, _ = self.path.split("/")
        found = self.hub.repositories[f"{owner}/{model}"]
        refs = {
            kind: [{"name": name, "ref": f"refs/{name}", "targetCommit": commit} for name, commit in own.items()]
            for kind, own in (("branches", found.branches), ("tags", found.tags), ("converts", {}))
        }
        return self._answer(refs)

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return


def _info(path: str, content: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob " + str(len(content)).encode() + b"\0" + content).hexdigest()
    info = {"type": "file", "path": path, "size": len(content), "oid": git}
    if path.endswith(".safetensors"):
        info["lfs"] = {"size": len(content), "oid": hashlib.sha256(content).hexdigest(), "pointerSize": 134}
    return info


@contextmanager
def served() -> Iterator[Hub]:
    """Run the hub at an address of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()
