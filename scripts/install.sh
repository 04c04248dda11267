#!/usr/bin/env bash
# Installs the project into a virtual environment:  scripts/install.sh VENV [dev]
#
# By default that is this checkout, of which later changes take effect. WHEEL is the wheel to install instead.
# CONSTRAINTS is the file of versions; empty, the newest that pyproject.toml allows are installed. DEVICE is cpu or cuda; by default,
# cuda where there is an NVIDIA GPU.
#
# Without an NVIDIA GPU the CPU build of torch is taken if pip can find one (point PIP_EXTRA_INDEX_URL at an index that has CPU
# builds); otherwise the default build, which runs on the CPU too but is several GB larger, on ARM as on x86-64. With one, the kernels for it are installed
# too: extra `cuda`.
set -euo pipefail
venv=$1
extras=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

"$python" - <<'CHECK'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"mlmclm needs Python 3.11 or newer; this is {sys.version.split()[0]}. Run again with PYTHON=/path/to/python3.11.")
CHECK
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
device=${DEVICE:-cpu}
if [ -z "${DEVICE:-}" ] && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    device=cuda
fi
[ "$device" = cpu ] || extras=cuda${extras:+,$extras}
constraints=()
[ -z "${CONSTRAINTS-constraints.txt}" ] || constraints=(-c "$here/${CONSTRAINTS-constraints.txt}")
if [ ${#constraints[@]} -gt 0 ] && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    torch=$(grep -E '^torch==' "${constraints[1]}")
    echo "installing $torch ..."
    if [ "$device" = cuda ]; then
        "$venv/bin/pip" install --quiet "${constraints[@]}" torch
    else
        "$venv/bin/pip" install --quiet "$torch+cpu" 2>/dev/null || "$venv/bin/pip" install --quiet "$torch"
    fi
fi
package=(-e "$here${extras:+[$extras]}")
[ -z "${WHEEL:-}" ] || package=("mlmclm${extras:+[$extras]} @ file://$(realpath "$WHEEL")")
echo "installing mlmclm and what it needs (about two minutes the first time) ..."
# pip before 23.1 (Debian 12's) builds a package without pyproject.toml, such as seqeval, in a way that leaves out what its build
# needs in turn; --use-pep517 is what later versions do.
"$venv/bin/pip" install --quiet --use-pep517 "${constraints[@]}" "${package[@]}"
