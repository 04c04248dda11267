"""Location of a model to continue from: a folder, or a name on the Hugging Face hub. Nothing here needs torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlmclm.errors import EnvironmentFault, UserError, one_line
from mlmclm.models.notes import tokenizer_file_hash
from mlmclm.storage.files import first_there, hash_file, places_of, read_json

HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(@(?!/|.*\.\.)[\w./-]+)?")
"""OWNER/NAME, with @REVISION unless it is the newest. A revision becomes part of a path below the Hub's cache, so it
cannot lead outside."""
OWNERS = {
    "bert-": "google-bert",
    "distilbert-": "distilbert",
    "ettin-": "jhu-clsp",
    "eurobert-": "EuroBERT",
    "modernbert-": "answerdotai",
    "roberta-": "FacebookAI",
    "xlm-roberta-": "FacebookAI",
}
"""Beginnings of names, in small letters, of encoders that people call without their owner on the Hub."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def hub_hint(model: str) -> str:
    """Return a sentence that gives a model's full name on the Hub, or how such names look; empty for a path."""
    if "/" in model:
        return ""
    owners = [owner for beginning, owner in OWNERS.items() if model.lower().startswith(beginning)]
    return f" On the Hub it is {owners[0]}/{model}." if owners else " A model of the Hub is named OWNER/NAME."


def local_folder(source: str, data_root: Path | None = None, beside: Path | None = None) -> Path | None:
    """Return the folder that a source names (`files.places_of`); None if there is no such folder."""
    return first_there(places_of(source, beside, data_root))


def fetch(source: str, data_root: Path | None = None, beside: Path | None = None) -> Path:
    """Return the folder of a source; a name's files are first fetched from the hub into the local cache.

    Raises:
        EnvironmentFault: there is no such folder, and the hub can't provide it.
        UserError: there is no such folder, and the source can't be a name on the hub.
    """
    return _fetch(source, ["*.json", "*.safetensors"], places_of(source, beside, data_root))


def fetch_config(source: str, data_root: Path | None = None, beside: Path | None = None) -> Path:
    """Return a folder with the source's config.json, and fetch nothing else; otherwise like `fetch`."""
    return _fetch(source, ["config.json"], places_of(source, beside, data_root))


def _fetch(source: str, patterns: list[str], places: list[Path]) -> Path:
    folder = first_there(places)
    if folder is not None:
        return folder
    if HUB_NAME.fullmatch(source) is None:
        looked = f" (looked for {' and '.join(map(str, places))})" if len(places) > 1 else ""
        raise UserError(f"{source}: no such model folder{looked}.{hub_hint(source)}")
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")
    try:
        # Files at the top level only.
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=patterns, ignore_patterns=["*/*"])
        )
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"{source}: no such folder, and it cannot be loaded from the Hugging Face hub "
            f"({one_line(error, 300)}). Check the name and the network, or give a local folder."
        ) from error


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder; raise a `UserError` if an index names a shard that isn't there."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise UserError(f"{path}: the weights {', '.join(missing)} that {index.name} names are missing.")
        return [path / name for name in names]
    single = path / "model.safetensors"
    return [single] if single.is_file() else []


def tokenizer_file(folder: Path) -> Path:
    """Return a folder's tokenizer.json; raise a `UserError` if there is none."""
    file = folder / TOKENIZER_FILES[0]
    if not file.is_file():
        raise UserError(f"{folder}: the tokenizer is missing ({file.name}; it must be a fast one).")
    return file


def content_hash(folder: Path) -> str:
    """Return the SHA-256 (hex) of configuration, weights (however sharded) and tokenizer; a `UserError` if one is missing."""
    weights = weight_files(folder)
    if not (folder / "config.json").is_file() or not weights:
        raise UserError(
            f"{folder}: not a model folder: it needs config.json, and weights as safetensors (model.save_pretrained writes them)."
        )
    tokenizer_file(folder)
    digest = hashlib.sha256()
    for file in [folder / "config.json", *weights]:
        digest.update(bytes.fromhex(hash_file(file)))
    for file in (folder / name for name in TOKENIZER_FILES):
        digest.update(bytes.fromhex(tokenizer_file_hash(file)) if file.is_file() else bytes(32))
    return digest.hexdigest()


def longest(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence, in tokens, that a model of this config.json takes; None if it doesn't say."""
    positions = config.get("max_position_embeddings")
    if positions is None:
        return None
    # RoBERTa's positions follow the padding position.
    return int(positions) - (config.get("pad_token_id", 1) + 1 if config.get("model_type") == "roberta" else 0)
