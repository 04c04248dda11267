"""A stand-in for the Hugging Face Hub: repositories in memory, behind the requests that its Python libraries send.

It answers what huggingface_hub, datasets and transformers ask: information, listings in pages, revisions, files with
their ETags, commits and ranges (large ones by a redirect, as from the Hub's CDN), access to gated and private
repositories, and uploads, small files in the commit and large ones by git-lfs. It doesn't speak Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".parquet")
"""Suffixes of the files that git-lfs keeps."""
PAGE = 4
"""Files on each page of a listing."""
_KINDS = {"models": "model", "datasets": "dataset"}


def commit(number: int) -> str:
    """Return the identifier of a commit, as long as git's; commit 0 is the empty one with which a repository begins."""
    return f"{number:040x}"


@dataclass
class Repository:
    """Branches and tags as commits, and commits as files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {commit(0): {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": commit(0)})
    tags: dict[str, str] = field(default_factory=dict)
    kind: str = "model"
    readers: set[str] | None = None
    """Tokens that may read its files, if it is gated or private."""
    private: bool = False
    """Whether it doesn't exist for others."""

    def commit_of(self, revision: str) -> str | None:
        oid = {**self.branches, **self.tags}.get(revision, revision)
        return oid if oid in self.commits else None

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.commit_of(revision) or revision]

    def add(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make a commit with these files only; return its identifier."""
        oid = commit(len(self.commits))
        self.commits[oid] = dict(files)
        self.branches[branch] = oid
        return oid


@dataclass
class Hub:
    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """Path and first line of each request with a body."""
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path and status of each request."""
    collections: dict[str, list[str]] = field(default_factory=dict)
    """Names of models by the collection's slug; collections can be created for the user `me` only."""
    commits_left: int = 10**6
    """Commits that the server accepts before it fails."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""

    def put(self, name: str, files: Path | Mapping[str, bytes], kind: str = "model") -> str:
        """Make a commit of a folder's files, or of the mapping's; return its identifier."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        return self.repositories.setdefault(name, Repository(kind=kind)).add(files)


class _Refused(Exception):
    """An answer other than 200, with the Hub's headers of errors."""

    def __init__(self, status: int, code: str | None = None, message: str = "refused", **headers: str) -> None:
        self.status, self.headers = status, {"X-Error-Message": message, **headers}
        if code is not None:
            self.headers["X-Error-Code"] = code


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = self.headers.get("Content-Length")
        self.body = (
            self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(int(length or 0))
        )
        parts = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            for pattern, answer in _ROUTES:
                if match := pattern.fullmatch(f"{self.command} {parts.path}"):
                    answer(self, *(None if group is None else unquote(group) for group in match.groups()))
                    return
            raise _Refused(404)
        except _Refused as refused:
            self._answer({"error": refused.headers["X-Error-Message"]}, refused.status, **refused.headers)

    # Access

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _repository(self, kinds: str | None, name: str) -> Repository:
        repository, token = self.hub.repositories.get(name), self._token()
        hidden = repository is not None and repository.private and token not in (repository.readers or ())
        if repository is None or hidden or repository.kind != _KINDS[(kinds or "models").rstrip("/")]:
            # Without a token, the answer does not say whether there is a private one.
            raise _Refused(404, "RepoNotFound", "Repository not found") if token else _Refused(401, message="Invalid username or password.")  # fmt: skip
        return repository

    def _check_gate(self, repository: Repository, name: str) -> None:
        if repository.readers is not None and self._token() not in repository.readers:
            raise _Refused(403 if self._token() else 401, "GatedRepo", f"Access to {name} is restricted.")

    def _commit(self, repository: Repository, revision: str) -> str:
        oid = repository.commit_of(revision)
        if oid is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid

    # Reading

    def _list(self, kinds: str) -> None:
        author, search = self.query.get("author"), self.query.get("search", "").lower()
        shown = [
            name
            for name, repository in self.hub.repositories.items()
            if repository.kind == _KINDS[kinds] and author in (None, name.partition("/")[0]) and search in name.lower()
        ]
        self._answer([{"id": name, "sha": None} for name in shown if not self.hub.repositories[name].private])

    def _about(self, kinds: str, name: str, revision: str | None) -> None:
        repository = self._repository(kinds, name)
        oid = self._commit(repository, revision or "main")
        siblings = [{"rfilename": path} for path in repository.commits[oid]]
        gated = "manual" if repository.readers is not None and not repository.private else False
        self._answer({"id": name, "sha": oid, "siblings": siblings, "private": repository.private, "gated": gated})

    def _may(self, kinds: str, name: str) -> None:
        self._check_gate(self._repository(kinds, name), name)
        self._answer({})

    def _refs(self, kinds: str, name: str) -> None:
        repository = self._repository(kinds, name)
        refs = {
            kind: [{"name": name, "ref": f"refs/{name}", "targetCommit": oid} for name, oid in commits.items()]
            for kind, commits in (("branches", repository.branches), ("tags", repository.tags), ("converts", {}))
        }
        self._answer(refs)

    def _tree(self, kinds: str, name: str, revision: str, folder: str | None) -> None:
        repository = self._repository(kinds, name)
        oid = self._commit(repository, revision)
        files, start = repository.commits[oid], f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(start)}
        if start and not inside:
            raise _Refused(404, "EntryNotFound", f"{folder} does not exist", **{"X-Repo-Commit": oid})
        recursive = self.query.get("recursive", "false").lower() == "true"
        entries = [_info(path, file) for path, file in inside.items() if recursive or "/" not in path[len(start) :]]
        folders = {path[: position.start()] for path in inside for position in re.finditer("/", path)}
        folders = {path for path in folders if path.startswith(start) and (recursive or "/" not in path[len(start) :])}
        entries = sorted([*entries, *map(_folder, folders)], key=lambda entry: str(entry["path"]))
        begin = int(self.query.get("cursor", 0))
        more = f"{self.hub.address}{self.path.partition('?')[0]}?recursive={recursive}&cursor={begin + PAGE}"
        link = {"Link": f'<{more}>; rel="next"'} if begin + PAGE < len(entries) else {}
        self._answer(entries[begin : begin + PAGE], **link)

    def _paths(self, kinds: str, name: str, revision: str) -> None:
        repository = self._repository(kinds, name)
        files = repository.commits[self._commit(repository, revision)]
        asked = parse_qs(self.body.decode())["paths"]
        folders = [_folder(path) for path in asked if any(file.startswith(f"{path}/") for file in files)]
        self._answer([*(_info(path, files[path]) for path in asked if path in files), *folders])

    def _resolve(self, kinds: str | None, name: str, revision: str, path: str) -> None:
        repository = self._repository(kinds, name)
        self._check_gate(repository, name)
        oid = self._commit(repository, revision)
        content = repository.commits[oid].get(path)
        headers = {"X-Repo-Commit": oid}
        if content is None:
            raise _Refused(404, "EntryNotFound", f"{path} does not exist", **headers)
        info = _info(path, content)
        if "lfs" not in info:
            self._send(content, **headers, ETag=f'"{info["oid"]}"')
            return
        sha = info["lfs"]["oid"]
        self.hub.objects[sha] = content
        # A different host, like the Hub's CDN: the libraries follow redirects to the same host before they read the headers.
        headers["Location"] = f"{self.hub.address.replace('127.0.0.1', 'localhost')}/cdn/{sha}"
        self._answer({}, 302, **headers, **{"X-Linked-ETag": f'"{sha}"', "X-Linked-Size": str(len(content))})

    def _object(self, sha: str) -> None:
        self._send(self.hub.objects[sha], ETag=f'"{sha}"')

    def _send(self, content: bytes, **headers: str) -> None:
        """Answer with a file, or the range of it that is asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._bytes(content, 200, {**headers, "Accept-Ranges": "bytes"})
        begin, end = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
        if begin >= len(content):
            return self._bytes(b"", 416, {"Content-Range": f"bytes */{len(content)}"})
        ranges = {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
        return self._bytes(content[begin:end], 206, {**headers, **ranges})

    # Writing

    def _create(self) -> None:
        request = json.loads(self.body)
        self.hub.asked.append((self.path, request))
        name = f"{request.get('organization') or 'me'}/{request['name']}"
        private = bool(request.get("private")) or request.get("visibility") == "private"
        repository = Repository(kind=request.get("type") or "model", private=private)
        repository.readers = {self._token()} if private else None
        self.hub.repositories.setdefault(name, repository)
        self._answer({"url": f"{self.hub.address}/{name}", "name": name})

    def _collect(self) -> None:
        request = json.loads(self.body)
        self.hub.asked.append((self.path, request))
        slug = f"{request['namespace']}/{request['title'].replace(' ', '-')}"
        if request["namespace"] != "me":
            raise _Refused(403, message="You don't have the rights to create a collection there")
        if slug in self.hub.collections:
            self._answer({"slug": slug}, 409)
        else:
            self.hub.collections[slug] = []
            self._collection(slug)

    def _collection(self, slug: str) -> None:
        item = json.loads(self.body)["item"]["id"] if self.path.endswith("/items") else None
        items = self.hub.collections[slug]
        if item in items:
            raise _Refused(409, message="there")
        items += [item] if item is not None else []
        about = {"title": slug, "owner": {"name": "me"}, "lastUpdated": "2026-01-02T03:04:05.000Z", "private": True}
        self._answer(about | {"slug": slug, "items": [], "position": 0, "theme": "blue", "upvotes": 0, "gating": False})

    def _checked_card(self) -> None:
        self._answer({})

    def _write(self, kinds: str, name: str, what: str, revision: str) -> None:
        repository = self._repository(kinds, name)
        lines = [json.loads(line) for line in self.body.splitlines() if line]
        self.hub.asked.append((self.path, lines[0]))
        if what == "preupload":
            modes = {True: "lfs", False: "regular"}
            files = [{**file, "uploadMode": modes[file["path"].endswith(LARGE)], "shouldIgnore": False} for file in lines[0]["files"]]  # fmt: skip
            return self._answer({"files": files})
        if what == "branch":
            if revision in repository.branches:
                raise _Refused(409, message="there")
            repository.branches[revision] = repository.branches["main"]
            return self._answer({})
        if what == "tag":
            assert lines[0]["tag"] not in repository.tags
            repository.tags[lines[0]["tag"]] = revision
            return self._answer({})
        if not self.hub.commits_left:
            raise _Refused(400, message="no more")  # at 500 the library retries for a long time
        self.hub.commits_left -= 1
        new = {value["path"]: base64.b64decode(value["content"]) for value in _values(lines, "file")}
        new |= {value["path"]: self.hub.objects[value["oid"]] for value in _values(lines, "lfsFile")}
        gone = {value["path"] for value in _values(lines, "deletedFile")}
        kept = {path: content for path, content in repository.files(revision).items() if path not in gone}
        oid = repository.add({**kept, **new}, revision)
        address = f"{self.hub.address}/{name}/commit/{oid}"
        return self._answer({"commitUrl": address, "commitOid": oid, "success": True})

    def _batch(self, kinds: str | None, name: str) -> None:
        self._repository(kinds, name)
        objects = [
            {**item, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{item['oid']}"}}}
            for item in json.loads(self.body)["objects"]
        ]
        self._answer({"transfer": "basic", "objects": objects})

    def _store(self, sha: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != sha:
            raise _Refused(400, message="another content")
        self.hub.objects[sha] = self.body
        self._answer({})

    # Bytes

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, value: Any, status: int = 200, **headers: str) -> None:
        self._bytes(json.dumps(value).encode(), status, {"Content-Type": "application/json", **headers})

    def _bytes(self, content: bytes, status: int, headers: Mapping[str, str]) -> None:
        self.hub.calls.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return


_NAME, _API = r"([^/]+/[^/]+)", r"/api/(models|datasets)"
_ROUTES: list[tuple[re.Pattern[str], Callable[..., None]]] = [
    (re.compile(pattern), answer)
    for pattern, answer in (
        ("POST /api/repos/create", _Handler._create),
        ("POST /api/validate-yaml", _Handler._checked_card),
        ("POST /api/collections", _Handler._collect),
        (f"(?:GET|POST) /api/collections/{_NAME}(?:/items)?", _Handler._collection),
        (f"GET {_API}", _Handler._list),
        (f"GET {_API}/{_NAME}/auth-check", _Handler._may),
        (f"GET {_API}/{_NAME}/refs", _Handler._refs),
        (rf"GET {_API}/((?:[^/]+/)?[^/]+)(?:/revision/([^/]+))?", _Handler._about),
        (f"GET {_API}/{_NAME}/tree/([^/]+)(?:/(.+))?", _Handler._tree),
        (f"POST {_API}/{_NAME}/paths-info/([^/]+)", _Handler._paths),
        (f"POST {_API}/{_NAME}/(preupload|commit|branch|tag)/([^/]+)", _Handler._write),
        (rf"POST /(datasets/)?{_NAME}\.git/info/lfs/objects/batch", _Handler._batch),
        ("PUT /lfs/([0-9a-f]+)", _Handler._store),
        ("(?:GET|HEAD) /cdn/([0-9a-f]+)", _Handler._object),
        (f"(?:GET|HEAD) /(datasets/)?{_NAME}/resolve/([^/]+)/(.+)", _Handler._resolve),
    )
]


def _values(lines: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [line["value"] for line in lines if line["key"] == key]


def _info(path: str, content: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob " + str(len(content)).encode() + b"\0" + content).hexdigest()
    info = {"type": "file", "path": path, "size": len(content), "oid": git}
    if path.endswith(LARGE):
        info["lfs"] = {"size": len(content), "oid": hashlib.sha256(content).hexdigest(), "pointerSize": 134}
    return info


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}


@contextmanager
def served() -> Iterator[Hub]:
    """Run the hub at an address of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
