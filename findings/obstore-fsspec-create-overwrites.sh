#!/bin/bash
# obstore 0.12.1 with fsspec 2026.9.0.
# Guess: pipe_file(path, value, mode="create") of obstore.fsspec refuses an object that exists, as obstore's own put and
# fsspec's other file systems do, or refuses the option.
# In fact the option is dropped: the object is overwritten without an error.
# Hurts: whoever puts obstore in place of s3fs, gcsfs or adlfs (obstore.fsspec.register): leases that are taken by
# creating an object have two holders, and a result that must not change is replaced.
# Source: developmentseed/obstore, obstore/fsspec.py: `_pipe_file` has `mode` and does not use it.
# Output seen: b'first' is b'second' afterwards with obstore.fsspec; FileExistsError with fsspec's memory and local files.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q obstore==0.12.1 fsspec==2026.9.0 || exit 2
"$place/venv/bin/python" - "$place" <<'PYTHON'
import asyncio
import sys

import fsspec
import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.fsspec import FsspecStore
from obstore.store import MemoryStore

print(f"obstore {obstore.__version__}, fsspec {fsspec.__version__}")
store, refused = MemoryStore(), False
obstore.put(store, "lease", b"first", mode="create")
try:
    obstore.put(store, "lease", b"second", mode="create")
except AlreadyExistsError:
    refused = True
print(f"obstore.put: {'AlreadyExistsError' if refused else 'no error'}")
found = {}


def note(name, refused, content):
    found[name] = "FileExistsError" if refused else content
    print(f"{name}: {found[name]}")


for name, files in (("fsspec memory", fsspec.filesystem("memory")), ("fsspec local", fsspec.filesystem("file"))):
    path, refused_here = f"{sys.argv[1]}/{name[7:]}", False
    files.pipe_file(path, b"first", mode="create")
    try:
        files.pipe_file(path, b"second", mode="create")
    except FileExistsError:
        refused_here = True
    note(name, refused_here, files.cat_file(path))


async def twice(name, files):
    """The asynchronous form, so that no thread of fsspec is left at the end."""
    path, refused_here = f"{sys.argv[1]}/{name[15:]}", False
    await files._pipe_file(path, b"first", mode="create")
    try:
        await files._pipe_file(path, b"second", mode="create")
    except FileExistsError:
        refused_here = True
    note(name, refused_here, await files._cat_file(path))


for name, protocol in (("obstore.fsspec memory", "memory"), ("obstore.fsspec local files", "file")):
    asyncio.run(twice(name, FsspecStore(protocol, asynchronous=True)))
same = refused and list(found.values()) == ["FileExistsError", "FileExistsError", b"second", b"second"]
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON
