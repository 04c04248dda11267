"""Model folders: required files, identity, and loading without running anything that came with them."""

from __future__ import annotations

import hashlib
import inspect
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.corpora.exported_tokenizer import TOKENIZER_FILES, corpus_tokenizer, original_text, tokenizer_file_hash
from mlmclm.corpora.fast_tokenizer import read_tokenizer
from mlmclm.corpora.notes import CONTEXT, NOTES, read_notes
from mlmclm.errors import UserError, one_line
from mlmclm.models.config_hashes import config_hashes
from mlmclm.models.sources import INDEX, WEIGHTS, longest, tokenizer_file, weight_files
from mlmclm.models.tokenizer_settings import ROLES, SETTINGS, tokenizer_settings, wrote_settings
from mlmclm.storage.checksums import CHECKSUMS, checked, has_checksums
from mlmclm.storage.files import canonical_json, hash_file, read_json, write_json
from mlmclm.storage.temporary import swept_folder

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
POOLED = ("bert", "roberta")
"""Architectures whose base model has a layer over the first token, which no language model trains and no code here
uses."""
CHANGED = (
    "Delete {folder}: `mlmclm study` or `mlmclm pretrain` exports a model of a study again. If it was changed on purpose, delete its "
    "checksums.json."
)
_BESIDE = "config.json and tokenizer.json go beside it (model.config.save_pretrained, tokenizer.save_pretrained)"
OTHERS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("a checkpoint of DeepSpeed", f"`python zero_to_fp32.py CHECKPOINT OUTPUT --safe_serialization` writes model.safetensors; {_BESIDE}"): (
        "mp_rank_*_model_states.pt", "zero_pp_rank_*", "bf16_zero_pp_rank_*",
    ),
    ("a checkpoint of FSDP", f"`accelerate merge-weights CHECKPOINT OUTPUT` writes model.safetensors; {_BESIDE}"): (
        "*.distcp", "pytorch_model_fsdp*",
    ),
    ("an adapter", "merge it into its model (peft's merge_and_unload, then save_pretrained)"): ("adapter_config.json",),
    ("an exported model", "give the folder that it was exported from"): ("*.gguf", "*.onnx"),
    ("weights of TensorFlow or Flax", "convert them with transformers 4 (from_tf, from_flax)"): ("*.h5", "*.msgpack"),
    ("a variant of the weights", "rename it to model.safetensors"): ("model.*.safetensors",),
    ("a model", "give that folder"): ("*/config.json",),
}  # fmt: skip
"""Patterns of files in folders that are no models, by what such a folder holds and what to do with it."""
WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.)+")
"""Prefixes in the names of weights that were saved inside a wrapper: torch.compile's, or data parallelism's."""
BUFFERS = re.compile(r"(position_ids|token_type_ids|inv_freq|(attn|attention)\.(masked_)?bias)$")
"""Names of constants that older versions of transformers stored with the weights."""
DEFAULT_KERNELS: Mapping[str, Any] = {"attn_implementation": None, "experts_implementation": None}
"""Arguments for transformers that keep a configuration from choosing kernels. Kernels other than torch's need packages that
may be missing, or code from the Hub. None takes torch's where the model has them."""
COMMON = frozenset({"bert", "eurobert", "llama", "modernbert", "qwen2", "qwen3", "roberta"})
"""Model types that transformers is known to have. Others are looked up there, which costs an import of seconds."""


def _known(model_type: str) -> bool:
    if model_type in COMMON:
        return True
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def check_model_folder(path: Path) -> dict[str, Any]:
    """Return the configuration of a model folder.

    Raises:
        UserError: config.json, safetensors weights or a fast tokenizer is missing or damaged, the weights are a pickle,
            or transformers doesn't have the architecture.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such model folder.")
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: not a model folder: config.json is missing.{_instead(path)}")
    config = _check_alone(path / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{path / 'config.json'}: no 'model_type'; not a Hugging Face model's configuration.")
    if not _known(config["model_type"]):
        code = " It comes with code of its own, which is never run." if "auto_map" in config else ""
        raise UserError(f"{path}: the architecture {config['model_type']!r} is not one that transformers has.{code}")
    if quantized := _quantized(config):
        raise UserError(
            f"{path / 'config.json'}: {quantized}: weights that are quantized are not supported. Write the model with weights in fp32 or "
            "bf16 (model.dequantize, then model.save_pretrained), and without this key."
        )
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path}: adapter_config.json is of an adapter, which some programs would add to the weights beside it. Merge the adapter into "
            "them (merge_and_unload of peft does), or delete it."
        )
    from safetensors import SafetensorError

    files = weight_files(path)
    if not files:
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise UserError(
                f"{path}: the weights are a pickle ({', '.join(pickles)}), which can run code when it is read. "
                f"Convert them to safetensors (model.save_pretrained does) and try again.{_instead(path)}"
            )
        raise UserError(f"{path}: not a model folder: model.safetensors is missing.{_instead(path)}")
    for file in files:
        try:
            _names(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: cannot be read; is it cut short? ({error})") from error
    tokenizer_file(path)
    return config


def _instead(path: Path) -> str:
    """Return a sentence on what else a folder has, and what to do with it; empty if that is not known."""
    for (what, advice), patterns in OTHERS.items():
        if files := [
            file for place in ("", "*/") for pattern in patterns for file in sorted(path.glob(place + pattern))
        ]:
            return f" It has {what} ({files[0].relative_to(path)}): {advice}."
    return ""


def _check_alone(file: Path) -> dict[str, Any]:
    """Return the content of a config.json, or raise a `UserError` if it names other configuration files."""
    config: dict[str, Any] = read_json(file)
    if isinstance(config, dict) and "configuration_files" in config:
        raise UserError(
            f"{file}: configuration_files names other files, which transformers would read in its place. Put the content of the right "
            "one into config.json."
        )
    return config


def _quantized(config: Mapping[str, Any]) -> str | None:
    """Return the key of config.json, or of a configuration nested in it, that says that weights are quantized."""
    if config.get("quantization_config"):
        return "quantization_config"
    nested = {name: value for name, value in config.items() if isinstance(value, dict)}
    return next((f"{name}.{key}" for name, value in nested.items() if (key := _quantized(value))), None)


def check_finite(model: nn.Module, folder: Path) -> None:
    """Raise a `UserError` if a weight is infinite or not a number, so that scores would be arbitrary."""
    for name, weights in model.named_parameters():
        # torch has no `isfinite` for floats of one byte.
        values = weights.float() if weights.is_floating_point() and weights.element_size() == 1 else weights
        if not values.isfinite().all():
            raise UserError(
                f"{folder}: the weights {name} have values that are infinite or no numbers, so the model can't be evaluated."
            )


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 (hex) of a model: configuration, weights and all that decides how its tokenizer works.

    No path or name enters, nor which version of transformers wrote the files. An exported tokenizer.json is
    hashed as the corpus's, from which it was made (`corpora.exported_tokenizer`).

    Raises:
        UserError: the folder is not a model (see `check_model_folder`), or not what was exported.
    """
    return weights_hashes(folder)[0]


def weights_hashes(folder: Path, *, read: bool = True) -> tuple[str, ...]:
    """Return `weights_hash`, then those by earlier definitions (`config_hashes`), under which results may be filed.

    Args:
        read: whether to verify the files of an exported folder. Otherwise the noted checksums are used for its weights.
    """
    if read:
        checked(folder, None, CHANGED.format(folder=folder))
    sums = read_json(folder / CHECKSUMS) if has_checksums(folder) else {}
    check_model_folder(folder)
    tokenizer = bytes.fromhex(tokenizer_file_hash(folder / "tokenizer.json"))
    return _hashes(folder, sums, tokenizer + _more(tokenizer_settings(folder)))


def content_hashes(folder: Path) -> tuple[str, ...]:
    """Return the SHA-256 (hex) of the configuration, weights and tokenizer of a model to continue from, then the hashes by
    earlier definitions, under which a store may have the model.

    Raises:
        UserError: one of them is missing.
    """
    if not (folder / "config.json").is_file() or not weight_files(folder):
        check_model_folder(folder)
    tokenizer_file(folder)
    files = (folder / name for name in TOKENIZER_FILES)
    tokenizer = [bytes.fromhex(tokenizer_file_hash(file)) if file.is_file() else bytes(32) for file in files]
    # Not `settings`, whose file is hashed already, nor `reading`: these models were always read as their tokenizer.json says.
    more = {name: value for name, value in tokenizer_settings(folder).items() if name not in ("settings", "reading")}
    return _hashes(folder, {}, b"".join(tokenizer) + _more(more))


def _hashes(folder: Path, sums: Mapping[str, Any], tokenizer: bytes) -> tuple[str, ...]:
    """Return a folder's hashes, one for each of its `config_hashes`, in their order; `sums` are the known checksums."""
    files = {file.relative_to(folder).as_posix(): file for file in weight_files(folder)}
    weights = [sums[name]["sha256"] if name in sums else hash_file(file) for name, file in files.items()]
    # Hash names too: results under keys without them may be of other weights than those that were hashed.
    names = [] if list(files) == [WEIGHTS] else ["config.json", *files]
    rest = bytes.fromhex("".join(weights)) + _more(names) + tokenizer
    return tuple(hashlib.sha256(bytes.fromhex(config) + rest).hexdigest() for config in config_hashes(folder))


def _more(more: Any) -> bytes:
    """Return a JSON value as bytes to hash, none if it is empty: it is empty for most models, whose hashes stay as they were."""
    return canonical_json(more).encode() if more else b""


def tokenizer_hash(folder: Path) -> str:
    """Return the SHA-256 (hex) of all that decides how a folder's tokenizer works.

    An exported tokenizer has the hash of the corpus's, but for its special tokens.

    Raises:
        UserError: tokenizer.json is missing, or the tokenizer is not what was exported.
    """
    file = tokenizer_file(folder)
    names = [name for name in (*TOKENIZER_FILES, NOTES) if (folder / name).is_file()]
    checked(folder, names, CHANGED.format(folder=folder))
    digest = hashlib.sha256(bytes.fromhex(tokenizer_file_hash(file)))
    config = folder / SETTINGS
    settings = read_json(config) if config.is_file() else {}
    for name in ROLES:
        value = settings.get(name)
        digest.update(f"{name}={value.get('content') if isinstance(value, dict) else value};".encode())
    more = tokenizer_settings(folder)
    # The texts of special tokens are in the hash already; add their other properties.
    remaining = {
        name: value for name, value in more.pop("settings", {}).items() if name not in ROLES or isinstance(value, dict)
    }
    more |= {"settings": remaining} if remaining else {}
    if not wrote_settings(folder) and (folder / "config.json").is_file():
        # transformers chooses the tokenizer's class by the model's, and some classes change what tokenizer.json says.
        model = read_json(folder / "config.json")
        more["class"] = [model.get(name) for name in ("model_type", "tokenizer_class")]
    digest.update(_more(more))
    return digest.hexdigest()


def load_tokenizer(folder: Path, *, own_template: bool = False) -> PreTrainedTokenizerFast:
    """Load the fast tokenizer of a folder as its tokenizer.json says (`fast_tokenizer`), with truncation and padding off.

    Args:
        own_template: in an exported folder, add to a text what the corpus's tokenizer adds.

    Raises:
        UserError: it can't be read.
    """
    from tokenizers import Tokenizer

    tokenizer_file(folder)
    try:
        # Give the full path, because transformers has special rules for paths that equal the names of some models on the Hub.
        tokenizer = read_tokenizer(str(folder.absolute()), local_files_only=True)
    except Exception as error:
        # The tokenizers library raises bare Exception for a file it can't parse.
        raise UserError(f"{folder}: the tokenizer cannot be read ({one_line(error, 300)}).") from error
    # Published tokenizer.json files often contain their authors' settings of truncation and padding.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if own_template and corpus_tokenizer(folder) is not None:
        original = Tokenizer.from_str(original_text(folder / "tokenizer.json"))
        tokenizer.backend_tokenizer.post_processor = original.post_processor
    return tokenizer


def check_length(folder: Path, length: int) -> None:
    """Raise a `UserError` that names both lengths if sequences are longer than the folder's model allows, if it has a limit."""
    file = folder / "config.json"
    most = longest(read_json(file)) if file.is_file() else None
    if most is not None and length > most:
        raise UserError(f"max_length is {length}, but the model in {folder} was made for {most} positions at most.")


def context_of(folder: Path) -> int | None:
    """Return the context of a folder's model in tokens, of which `length_share` is a share.

    For a model that a study exported, this is the study's `recipe.block_length`, however many positions the model that
    it continued from has. For others it is the number of positions; None if config.json doesn't say. Raises a
    `UserError` if the noted context is no number of tokens.
    """
    notes = read_notes(folder)
    if CONTEXT not in notes:
        return longest(read_json(folder / "config.json"))
    context = notes[CONTEXT]
    if not isinstance(context, int) or context < 1:
        raise UserError(f"{folder / NOTES}: context is a number of tokens (got {context!r}).")
    return context


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bar and its report of weights that a class has no place for."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def read_config(folder: Path) -> PreTrainedConfig:
    """Read config.json without its settings of how transformers computes, such as the kernels of attention.

    Raises:
        UserError: it is not the configuration of a model, or names other files to be read in its place.
    """
    from transformers import AutoConfig

    file = folder / "config.json"
    _check_alone(file)
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **DEFAULT_KERNELS
        )
    except Exception as error:  # whatever the checks of a class raise
        raise UserError(f"{file}: transformers cannot read it ({one_line(error, 300)}).") from error
    # The arguments override neither private keys nor those of nested configurations.
    config._attn_implementation = config._experts_implementation = None
    # `read_model` itself finds the weights, and fusing layers would change their classes for every other model too.
    for name in {"transformers_weights", "fusion_config"} & vars(config).keys():
        delattr(config, name)
    return config


def read_model(kind: Any, folder: Path, **more: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a class of transformers with a folder's weights in fp32; return it and what didn't fit.

    Configuration and weights are those that `weights_hash` covers. Safetensors only, no remote code; `more` goes to
    `from_pretrained`.

    Raises:
        UserError: weights have another shape than config.json says.
    """
    import torch

    config = read_config(folder)
    if any(WRAPPERS.match(name) for file in weight_files(folder) for name in _names(file)):
        more["key_mapping"] = {WRAPPERS.pattern: ""}
    # transformers draws weights that the file lacks; this must not advance the global random generator.
    with quiet(), torch.random.fork_rng(devices=[]), _staged(folder) as staged:
        model, info = kind.from_pretrained(
            str(staged),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **DEFAULT_KERNELS,
            **more,
        )
    for name, stored, expected in sorted(info["mismatched_keys"]):
        shapes = (" x ".join(map(str, shape)) for shape in (stored, expected))
        raise UserError(f"{folder}: the weights {name} have the shape {next(shapes)}; config.json says {next(shapes)}.")
    model.name_or_path = model.config.name_or_path = str(folder)
    return model, info


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Yield a folder with links to config.json and the weights, in which transformers finds nothing else to load."""
    files = weight_files(folder)
    with swept_folder(Path(tempfile.gettempdir()), "mlmclm-weights-") as staged:
        (staged / "config.json").symlink_to((folder / "config.json").absolute())
        if len(files) == 1:
            (staged / WEIGHTS).symlink_to(files[0].absolute())
        else:
            places: dict[str, str] = {}
            for number, file in enumerate(files):
                link = staged / f"{number:06}.safetensors"
                link.symlink_to(file.absolute())
                places |= dict.fromkeys(_names(file), link.name)
            write_json(staged / INDEX, {"metadata": {}, "weight_map": places})
        yield staged


def _names(file: Path) -> list[str]:
    """Return the names of a safetensors file's weights."""
    from safetensors import safe_open

    with safe_open(file, framework="np") as handle:  # which needs no torch
        return list(handle.keys())


def load_encoder(folder: Path) -> PreTrainedModel:
    """Load the base model (`read_base`) with this package's attention, in evaluation mode.

    Raises:
        UserError: as `read_base`; or it can't attend in both directions.
    """
    from mlmclm.models.directions import use_either_direction

    encoder = read_base(folder)
    with quiet():
        use_either_direction(encoder, folder)
    return encoder


def read_base(folder: Path) -> PreTrainedModel:
    """Load the base model in fp32, in evaluation mode; safetensors only, no remote code.

    Weights stored in fp32 are mapped pages of the file, which all processes of a node that load it share until they
    write to them. A layer over the first token (a pooler), which no task uses, is left out or keeps its random weights.

    Raises:
        UserError: the folder is not a model, or weights of the base model are missing, of another shape or too many.
    """
    from transformers import AutoModel

    check_model_folder(folder)
    kind = AutoModel._model_mapping.get(type(read_config(folder)), AutoModel)
    pools = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    model, info = read_model(AutoModel, folder, **({"add_pooling_layer": False} if pools else {}))
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    if missing:
        unexpected = sorted(info["unexpected_keys"])
        hint = f" There are others: {', '.join(unexpected[:3])}." if unexpected else ""
        raise UserError(f"{folder}: the weights lack {', '.join(missing[:5])}.{hint}")
    # Unused weights may be a head's, but not those of further layers or of relative positions that transformers no longer computes.
    parts = {name for name, _ in model.named_children()} - {"pooler"}
    unused = [
        name
        for name in sorted(info["unexpected_keys"])
        if name.removeprefix(f"{model.base_model_prefix}.").split(".")[0] in parts and BUFFERS.search(name) is None
    ]
    if unused:
        raise UserError(f"{folder}: {type(model).__name__} has no place for the weights {', '.join(unused[:5])}.")
    encoder: PreTrainedModel = model.eval()
    return encoder
