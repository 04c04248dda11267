#!/bin/bash
# fsspec 2026.9.0.
# Guess: AsyncFileSystemWrapper gives any file system asynchronous methods, and its open() is that of the wrapped one.
# In fact open() is the one of an abstract class, whose buffers go nowhere: what is written is lost when the file closes
# without an error ("wb", "xb" and "ab"), and no file appears. pipe_file() writes.
# Hurts: whoever writes checkpoints or results with open() on such a file system and believes that no error means written.
# Source: fsspec/filesystem_spec, fsspec/implementations/asyn_wrapper.py, which wraps methods with an underscored name.
# Output seen: exists False after "wb" and "xb"; True after pipe_file, and after "wb" on the wrapped file system.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q fsspec==2026.9.0 || exit 2
"$place/venv/bin/python" - "$place" <<'PYTHON'
import os
import sys

import fsspec
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

local = fsspec.filesystem("file")
wrapped = AsyncFileSystemWrapper(local)
print(f"fsspec {fsspec.__version__}")
there = {}
for name, files, mode in (("local", local, "wb"), ("wrapped", wrapped, "wb"), ("wrapped", wrapped, "xb")):
    path = f"{sys.argv[1]}/{name}-{mode}"
    with files.open(path, mode) as file:
        count = file.write(b"weights")
    there[name, mode] = os.path.exists(path)
    print(f"{name}, open {mode}: write returned {count}, exists {there[name, mode]}")
wrapped.pipe_file(f"{sys.argv[1]}/piped", b"weights")
piped = os.path.exists(f"{sys.argv[1]}/piped")
print(f"wrapped, pipe_file: exists {piped}")
same = list(there.values()) == [True, False, False] and piped
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON
