"""Hashes of a model's config.json that do not depend on the version of transformers that wrote it. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mlmclm.models.tokenizer_settings import SETTINGS
from mlmclm.storage.files import hash_file, read_json

WITHOUT_EFFECT = frozenset({"transformers_version", "_name_or_path", "_attn_implementation_autoset"})
"""Keys without effect on results: the version that wrote the file, the place that it was read from, and whether versions 4.46
to 4.55 chose the kernels of attention by themselves, which `read_config` does not leave to the file. `dtype` is none of
them: sentence-transformers computes in it. `architectures` says how a model is scored."""
WRITER = "5.23.0"
"""The version that counts as the writer of every file. It exported the first models, whose hashes are of the bytes."""


def config_hashes(folder: Path) -> tuple[str, ...]:
    """Return the SHA-256 (hex) of a folder's configuration, then those by earlier definitions, by which results are found.

    The first is the hash of the file as `WRITER` would have written it. Earlier definitions hashed the file's bytes.
    """
    file = folder / "config.json"
    config, of_bytes = read_json(file), hash_file(file)
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    # With this setting, transformers corrects the tokenizers that versions before 5 wrote.
    if not isinstance(config, dict) or (isinstance(settings, dict) and settings.get("fix_mistral_regex")):
        return (of_bytes,)
    written = {**_without(config), "transformers_version": WRITER}
    content = json.dumps(written, indent=2, sort_keys=True) + "\n"  # as transformers writes it
    return tuple(dict.fromkeys([hashlib.sha256(content.encode()).hexdigest(), of_bytes]))


def _without(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration, and those nested in it, without keys that have no effect."""
    return {
        name: _without(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in WITHOUT_EFFECT
    }
