"""Settings of a folder's tokenizer besides tokenizer.json, as transformers resolves them from many files.

Keys that contain the hash of tokenizer.json contain these settings too, if there are any. The content of the files is
hashed, not the tokenizer that a library makes of it, so that keys don't change with the library's version. Needs neither torch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mlmclm import versions
from mlmclm.corpora.exported_tokenizer import corpus_tokenizer, hash_of_corpus
from mlmclm.corpora.fast_tokenizer import PLAIN
from mlmclm.errors import UserError
from mlmclm.storage.checksums import CHECKSUMS, has_checksums
from mlmclm.storage.files import canonical_json, hash_file, read_json

SETTINGS, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
ROLES = ("bos_token", "eos_token", "sep_token", "cls_token", "pad_token", "mask_token")
"""Special tokens that this package asks a tokenizer for."""
PREPARED: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}
"""Settings of a prepared tokenizer besides its special tokens (`corpora.tokenizer.save`)."""
PREPARED_ROLES = {"bos_token", "eos_token", "pad_token", "mask_token"}
WITHOUT_EFFECT = frozenset({"chat_template", "model_max_length", "name_or_path"})
"""Settings that have no effect on encoding or decoding here."""
VOCABULARIES = (
    "tokenizer.*.json", "vocab*.json", "vocab.txt", "merges.txt", "*.model", "*.spm", "*.codes", "*.tiktoken", "tekken.json",
    "entity_vocab.json", "target_vocab.json", "dict.txt", "byte_maps.json", "emoji.json", "normalizer.json",
    "prophetnet.tokenizer", "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
"""Other files that transformers' tokenizers read."""


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return what decides how a folder's tokenizer works besides tokenizer.json, by the kind of file; empty if nothing does.

    Settings that mlmclm wrote, and that are as they were written, don't count: they follow from the corpus's tokenizer.
    `reading` marks folders for which earlier versions of mlmclm may have made other tokens or spans: they read tokenizer.json
    by a class of transformers, not as `fast_tokenizer` does, or trimmed letters off spans (`tasks.texts.token_spans`).

    Raises:
        UserError: one of the files is not a JSON object, or the settings name a file outside the folder.
    """
    settings = _read(folder / SETTINGS)
    _check_versions(folder, settings.get("fast_tokenizer_files") or [])
    resolved: dict[str, Any] = {}
    # transformers reads the two older files only if the settings don't list the added tokens themselves.
    if "added_tokens_decoder" not in settings:
        special, added = (_read(folder / name) for name in (SPECIAL_MAP, ADDED))
        resolved |= {"special": {name: value for name, value in special.items() if value != settings.get(name)}}
        resolved |= {"added": added}
    if not wrote_settings(folder):
        resolved["settings"] = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}
    files = {file for pattern in VOCABULARIES for file in folder.glob(pattern) if file.is_file()}
    resolved["files"] = {file.name: hash_file(file) for file in files}
    if (not wrote_settings(folder) and settings.get("tokenizer_class") not in PLAIN) or _puts_spaces(folder):
        resolved["reading"] = versions.TOKENIZER_READING
    return {name: value for name, value in resolved.items() if value}


def _puts_spaces(folder: Path) -> bool:
    """Return whether a pre-tokenizer puts a space before parts of a text, and the post-processor then trims spans."""
    content = _read(folder / "tokenizer.json")
    pre, post = (canonical_json(content.get(name)) for name in ("pre_tokenizer", "post_processor"))
    # Outside of a sequence, it puts one before the text only. Trimming allows for that if the post-processor has the setting too.
    everywhere = '"pretokenizers"' in pre or '"add_prefix_space":true' not in post
    return '"trim_offsets":true' in post and '"add_prefix_space":true' in pre and everywhere


def wrote_settings(folder: Path) -> bool:
    """Return whether the tokenizer's settings are those that mlmclm writes, so that they follow from the other files.

    Anybody can write notes and checksums that say so. So the settings have to be what mlmclm writes for this
    tokenizer.json and config.json.
    """
    file = folder / SETTINGS
    settings, config = _read(file), _read(folder / "config.json")
    general = {name: value for name, value in settings.items() if name not in (*ROLES, *WITHOUT_EFFECT)}
    tokens = {name: value for name, value in settings.items() if name in ROLES}
    if general != PREPARED or not tokens.keys() <= PREPARED_ROLES:
        return False
    tokenizer = _read(folder / "tokenizer.json")
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    if not all(isinstance(text, str) and text in ids for text in tokens.values()):
        return False
    if config and not _is_end(tokens.get("eos_token"), ids, corpus_tokenizer(folder) or tokenizer, config):
        return False
    if hash_of_corpus(file) or (has_checksums(folder) and file.name in read_json(folder / CHECKSUMS)):
        return True  # a given model's configuration may have other padding and mask tokens, which change no score
    # Not BOS: a decoder's configuration has EOS in its place. No cell uses BOS, and `tokenizer_hash` covers it.
    return all(config.get(f"{name}_id") in (None, ids[text]) for name, text in tokens.items() if name != "bos_token")


def _is_end(text: Any, ids: Mapping[str, int], corpus: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the hashed files alone determine that a token ends texts, as it does in fine-tuning.

    The corpus's template determines the token, if it puts one after a text. Otherwise the configuration does, unless that
    has several such tokens.
    """
    try:
        ends = _ends(corpus.get("post_processor"))
    except (AttributeError, IndexError, KeyError, TypeError):
        return False  # no tokenizer can be made of it
    if ends:
        return ends == {text}
    end = config.get("eos_token_id")
    return text in ids and (end if isinstance(end, list) else [end]) == [ids[text]]


def _ends(processor: Mapping[str, Any] | None) -> set[str]:
    """Return the tokens that a post-processor puts after a text."""
    if processor is None:
        return set()
    if "sep" in processor:
        return {processor["sep"][0]}
    last = (processor.get("single") or [{}])[-1].get("SpecialToken")
    return {last["id"]} if last else set().union(*map(_ends, processor.get("processors", [])))


def _check_versions(folder: Path, names: Any) -> None:
    """Refuse files that other versions of transformers read in place of tokenizer.json, unless their content is hashed."""
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or "/" in name or not fnmatchcase(name, "tokenizer*.json"):
            raise UserError(
                f"{folder / SETTINGS}: fast_tokenizer_files names {name!r}, which transformers could read in place of tokenizer.json; "
                "allowed are files of the folder itself, such as tokenizer.4.0.0.json. Delete the key to use tokenizer.json."
            )


def _read(file: Path) -> dict[str, Any]:
    content = read_json(file) if file.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object.")
    return content
