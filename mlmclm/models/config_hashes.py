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
to 4.55 chose the kernels of attention by themselves (`read_config` ignores this). Two keys do have an effect:
sentence-transformers computes in `dtype`, and `architectures` determines how a model is scored."""
WRITER = "5.23.0"
"""The version that is taken as the writer of every file. It exported the first models, so hashes of their bytes stay valid."""


def config_hashes(folder: Path) -> tuple[str, ...]:
    """Return the SHA-256 (hex) of a folder's configuration, then those by earlier definitions, under which older results are filed.

    The first is the hash of the file as `WRITER` would have written it. Earlier definitions hashed the file's bytes.
    """
    file = folder / "config.json"
    config, of_bytes = read_json(file), hash_file(file)
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    # With this setting, the writing version matters: transformers corrects tokenizers that versions before 5 wrote.
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
