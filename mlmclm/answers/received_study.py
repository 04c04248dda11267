"""Check of a study.yaml that others wrote: the file must not name paths or services on the reader's machine."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlmclm.errors import CONTROLS, UserError, clipped, unknown

RECORD = "bundle.json"
"""The file that marks a folder as a record, that is, a published study."""
ELSEWHERE = (
    "tracking", "shards", "cache", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "wandb",
)  # fmt: skip
"""Keys in a study's file about the machine that computed it. DeepSpeed's keys among them write files or send data to a server."""
KEYS = (
    "name", "models", "initial", "parts", "replicates", "baseline", "corpus", "corpora", "tokenizer", "recipe", "device",
    "space", "tasks", "seeds", "per_task", "per_model", "zero_shot", "claims", "card",
)  # fmt: skip
"""Keys of a study's file that a record may have."""
FREE_TEXT = ("description", "citation", "licence", "datasets")
"""Keys whose text is only for people to read, so it may contain addresses."""
DEEPSPEED = (
    "activation_checkpointing", "communication_data_type", "dump_state", "gradient_predivide_factor", "memory_breakdown", "prescale_gradients",
    "sparse_gradients", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)  # fmt: skip
"""DeepSpeed's settings that a record may have: none reads or writes files."""
DEEPSPEED_WORDS = ("auto", "bf16", "cpu", "fp16", "fp32", "none")
REMEDY = "A record is read only if it names nothing outside of its folder."


def check_study(values: Any, where: Path, files: Collection[str] | None = None) -> None:
    """Check the values of a study's file that others wrote.

    Args:
        where: the file.
        files: the names of the files that belong to the study; None if they are not known.

    Raises:
        UserError: a key is not allowed, or a value is an address, a path that could lead out of the folder, or a file that may hold code.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected a mapping of keys to values, got {type(values).__name__}.")
    for key in values:
        if key not in KEYS:
            raise unknown("key of a record's study", key, KEYS, where=str(where))
    for place, _ in texts_in(values):
        name = next((key for key in place if key in ELSEWHERE), None)
        if name is not None:
            raise UserError(f"{where}: {'.'.join(place)}: {name} is about the machine of whoever computes. {REMEDY}")
    check_texts(values, where)
    _check_deepspeed(values.get("recipe"), where)
    zero_shot = values.get("zero_shot")
    for task in _listed(zero_shot.get("tasks") if isinstance(zero_shot, Mapping) else None):
        if _is_file(task) and (where.parent / task).exists():
            raise UserError(f"{where}: zero_shot.tasks: {task!r} is a file of the record, refused as it may hold code.")
    space = values.get("space")
    named = [("space", space), *(("claims", claim) for claim in _listed(values.get("claims")))]
    if isinstance(space, Mapping):
        protocol = space.get("protocol")
        named.append(("space.protocol", protocol.get("base") if isinstance(protocol, Mapping) else protocol))
    for key, name in named:
        if isinstance(name, str) and _is_file(name) and files is not None and name not in files:
            raise UserError(f"{where}: {key}: the file {clipped(name)!r} is not one of the record's.")


def leads_out(text: str) -> bool:
    """Return whether a text could be an address, or a path that leads out of the folder it is resolved in."""
    return not text.isprintable() or any(
        part.startswith(("/", "~", "\\")) or ":/" in part or ":\\" in part or ".." in re.split(r"[/\\]", part)
        for part in text.split("=")
    )


def kept_inside(value: Any, key: str = "") -> Any:
    """Return the values of a study's file with each address or path that leads out reduced to its last part."""
    if isinstance(value, Mapping):
        return {name: kept_inside(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [kept_inside(item, key) for item in value]
    if isinstance(value, str) and key not in FREE_TEXT and leads_out(value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def _is_file(name: Any) -> bool:
    return isinstance(name, str) and (name.endswith((".yaml", ".yml")) or "/" in name)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def texts_in(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield all texts of a value with the keys that lead to them; a key is a text too."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield (*place, str(key)), str(key)
            yield from texts_in(item, (*place, str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item, place)
    elif isinstance(value, str):
        yield place, value


def check_plain(value: Any, where: object) -> None:
    """Check that a YAML file of others has only values of JSON; texts inside other types (bytes, sets) would go unchecked.

    Raises:
        UserError: the file has a value of another type.
    """
    if isinstance(value, Mapping):
        for part in (*value, *value.values()):
            check_plain(part, where)
    elif isinstance(value, list):
        for part in value:
            check_plain(part, where)
    elif not isinstance(value, str | int | float | None):
        raise UserError(
            f"{where}: it has a {type(value).__name__}. Allowed in a record: texts, numbers, true, false, null, lists and mappings."
        )


def check_texts(values: Any, where: object) -> None:
    """Check the texts of a YAML file of others: none is an address, leads out of the folder, or controls a terminal.

    Raises:
        UserError: a text breaks one of these rules, or a value is not one of JSON.
    """
    check_plain(values, where)
    for place, text in texts_in(values):
        if CONTROLS.search(text):
            raise UserError(
                f"{where}: {'.'.join(place)}: {clipped(repr(text))} has characters that control a terminal."
            )
        if place[-1] not in FREE_TEXT and leads_out(text):
            raise UserError(
                f"{where}: {'.'.join(place)}: {clipped(text)!r} is an address, an absolute path, or one with '..'. {REMEDY}"
            )


def _check_deepspeed(recipe: Any, where: object) -> None:
    settings = recipe.get("deepspeed") if isinstance(recipe, Mapping) else None
    if not isinstance(settings, Mapping):
        return
    for key in settings:
        if key not in DEEPSPEED:
            raise unknown("setting of DeepSpeed in a record", key, DEEPSPEED, where=f"{where}: recipe.deepspeed")
        for place, text in texts_in(settings[key], (key,)):
            if len(place) > 1 and text != place[-1] and text not in DEEPSPEED_WORDS:
                raise unknown("word", text, DEEPSPEED_WORDS, where=f"{where}: recipe.deepspeed.{'.'.join(place)}")
