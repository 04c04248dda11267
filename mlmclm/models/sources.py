"""Location of a model to continue from: a folder, or a name on the Hugging Face hub. Nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlmclm.corpora.exported_tokenizer import TOKENIZER_FILES
from mlmclm.corpora.hub_repository import HubRepository
from mlmclm.errors import UserError
from mlmclm.storage.files import first_existing, nearest, places_of, read_json

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
"""Prefixes, in small letters, of the names of encoders that people often give without their owner on the Hub -> that owner."""
NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._@-]*")
"""A model's name, as sweeps give it."""
AFTER_PADDING = frozenset(
    {
        "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
        "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Model types whose first position follows that of padding."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Files of a distributed checkpoint, which transformers prefers to any others."""


def hub_hint(model: str) -> str:
    """Return a sentence with a model's full name on the Hub, or else with the form of such names; empty for a path."""
    if "/" in model:
        return ""
    owners = [owner for beginning, owner in OWNERS.items() if model.lower().startswith(beginning)]
    return f" On the Hub it is {owners[0]}/{model}." if owners else " A model of the Hub is named OWNER/NAME."


def local_folder(source: str, data_root: Path | None = None, beside: Path | None = None) -> Path | None:
    """Return the folder that a source names (`files.places_of`); None if there is no such folder."""
    return first_existing(places_of(source, beside, data_root))


def fetch_source(source: str, data_root: Path | None = None, beside: Path | None = None) -> Path:
    """Return the folder of a source; a name's files are first fetched from the hub into the local cache.

    Raises:
        EnvironmentFault: there is no such folder, and the hub can't be reached or is switched off.
        UserError: there is no such folder, and the hub doesn't have it or doesn't show it to this user.
    """
    return _fetch(source, ["*.json", "*.safetensors"], places_of(source, beside, data_root))


def fetch_config(source: str, data_root: Path | None = None, beside: Path | None = None) -> Path:
    """Return a folder with the source's config.json, and fetch nothing else; otherwise like `fetch_source`."""
    return _fetch(source, ["config.json"], places_of(source, beside, data_root))


def _fetch(source: str, patterns: list[str], places: list[Path]) -> Path:
    folder = first_existing(places)
    if folder is not None:
        return folder
    if HUB_NAME.fullmatch(source) is None:
        looked = f" (looked for {' and '.join(map(str, places))})" if len(places) > 1 else ""
        raise UserError(f"{source}: no such model folder{looked}.{nearest(places)}{hub_hint(source)}")
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")
    try:
        # Files at the top level only.
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=patterns, ignore_patterns=["*/*"])
        )
    except (OSError, ValueError) as error:
        where = f"{source}: no such folder{(near := nearest(places)) and f' ({near[1:]})'}"
        raise HubRepository(name, "model", revision or None, where=where).trouble(error) from error


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder's weights, in the order in which they are read; empty if there are none.

    As in transformers, they are the file or index that config.json names (`transformers_weights`), else
    model.safetensors or those of its index.

    Raises:
        UserError: a named file isn't there or is outside of the folder, or it's not clear which weights are meant.
    """
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    if named is not None:
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise UserError(
                f"{path / 'config.json'}: transformers_weights is a safetensors file or an index (got {named!r})."
            )
        (file,) = _inside(path, [named], "config.json")
        files = _of_index(file) if file.suffix == ".json" else [file]
    else:
        single, index = path / WEIGHTS, path / INDEX
        files = [single] if single.is_file() else []
        if index.is_file() and (sharded := _of_index(index)) != files:
            if files:
                raise UserError(
                    f"{path}: it has {single.name}, and {index.name}, which names {', '.join(file.name for file in sharded[:3])}. "
                    "transformers loads the former, other programs the latter. Delete the one that is not meant."
                )
            files = sharded
    parts = [file.name for file in path.iterdir() if DISTRIBUTED.match(file.name) and file not in files]
    if parts:
        raise UserError(
            f"{path}: transformers would load the distributed checkpoint {min(parts)} in place of the weights beside it. Delete what is "
            "not meant; model.save_pretrained writes a model.safetensors."
        )
    return files


def _of_index(index: Path) -> list[Path]:
    """Return the files that an index names, sorted by name."""
    content = read_json(index)
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict):
        raise UserError(f"{index}: not an index of weights: it has no weight_map.")
    return _inside(index.parent, sorted(set(map(str, named.values()))), index.name)


def _inside(folder: Path, names: list[str], where: str) -> list[Path]:
    """Return the files of a folder that its file `where` lists by these names.

    Raises:
        UserError: one isn't there, or is outside of the folder.
    """
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{folder / where}: the weights {name!r} are outside of the folder.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder}: the weights {', '.join(missing)} that {where} names are missing.")
    return [folder / name for name in names]


def tokenizer_file(folder: Path) -> Path:
    """Return a folder's tokenizer.json; raise a `UserError` if there is none."""
    file = folder / TOKENIZER_FILES[0]
    if not file.is_file():
        raise UserError(
            f"{folder}: the tokenizer is missing ({file.name}; it must be a fast one). From other files of a tokenizer, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it."
        )
    return file


def longest(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence, in tokens, that a model of this config.json takes; None if it doesn't say."""
    positions = config.get("max_position_embeddings")
    if positions is None:
        return None
    padding = config.get("pad_token_id", 1)
    return int(positions) - (
        1 + (1 if padding is None else padding) if config.get("model_type") in AFTER_PADDING else 0
    )


def named_models(sources: Sequence[str], beside: Path | None = None) -> dict[str, str]:
    """Return the models' sources by name; `NAME=SOURCE` gives a name, else it is the last part of the source.

    A folder with an equals sign in its path (`lr=1e-4/last`) is a folder, and its name has hyphens in place of what
    names cannot have.

    Args:
        beside: the folder of the file that names the sources.

    Raises:
        ValueError: two models have one name.
    """
    named: dict[str, str] = {}
    for text in map(str, sources):
        name, equals, source = text.partition("=")
        folder = local_folder(text, beside=beside) if text else None
        if folder is not None:
            title, source = folder.name.partition("@")[0] or folder.resolve().name, text
            name = re.sub("[^A-Za-z0-9._@-]+", "-", title).lstrip("._@-") or title
        elif not equals or not NAME.fullmatch(name):
            name, source = text.replace("/", "") if text.endswith("/*") else Path(text.partition("@")[0]).name, text
        elif source.endswith("/*"):
            raise ValueError(f"{text!r}: the models of a study keep their own names")
        if not source:
            raise ValueError(f"{text!r}: a model's folder or name is missing")
        if name in named:
            raise ValueError(
                f"two models are called {name!r} ({named[name]} and {source}); give one a name of its own, as NAME=SOURCE"
            )
        named[name] = source
    return named
