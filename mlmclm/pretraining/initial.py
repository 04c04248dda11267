"""Models to continue from. Each is read once into the store; every worker, node and later run then uses the same files.

    initial/KEY/              the encoder that a study starts from: config.json, model.safetensors (fp32)
                              initial.json     its source and its shape
                              checksums.json   size and SHA-256 of each of these files
    initial/sources/ID.json   the content hash of a folder or hub name when it was last read, and the hub's commit
    initial/sources/HASH/     copies of the configuration and tokenizer with that content hash

A folder is hashed in every run; if its content has changed, it is a different model. A hub name is pinned to its
commit when it is first used (docs/models.md); deleting `ID.json` unpins it.

This module needs torch only to read a model for the first time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from mlmclm import versions
from mlmclm.corpora.corpus_config import TokenizerConfig
from mlmclm.corpora.exported_tokenizer import TOKENIZER_FILES
from mlmclm.corpora.notes import NOTES
from mlmclm.corpora.tokenizer import check_special, prepare_tokenizer, repository_of, tokenizer_key
from mlmclm.errors import UserError
from mlmclm.models.folder import content_hashes
from mlmclm.models.sizes import SIZES, Size
from mlmclm.models.sources import fetch_config, fetch_source, local_folder, longest
from mlmclm.progress import say
from mlmclm.storage.artifact import FolderArtifact, Origin
from mlmclm.storage.checksums import checked, read_sealed, write_sealed
from mlmclm.storage.files import canonical_json, places_of, read_json, stable_hash, write_json
from mlmclm.storage.unchanged import Unchanged

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from mlmclm.models.stored_tensors import StoredTensors
    from mlmclm.plans.recipe import Recipe


class StoredInitial(FolderArtifact):
    """The encoder made from a given model (a folder or a name on the hub), in the store."""

    kind = "given models"
    part = "initial"
    again = "`mlmclm pretrain` on its study, after it is deleted"
    remade = "rebuilt from the given model; where that is gone, put back a copy of the folder"

    def origin(self) -> Origin:
        """Read what the encoder was made from."""
        return Origin(self.facts, needs=(StoredSource(self.store, self.facts["content"]),))

    def opened(self) -> Self:
        """Return this encoder after verifying its description.

        Raises:
            UserError: if the checksum of its description differs.
        """
        remedy = "Delete this folder and run again to rebuild it from the model that the study names."
        checked(self.brought().folder, ("initial.json", "config.json"), remedy)
        return self

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Its description: source, commit and size, and the hash of the source's content."""
        return read_json(self.folder / "initial.json")

    @property
    def source(self) -> str:
        """The folder's name, or the name on the hub."""
        return str(self.facts["source"])

    @property
    def commit(self) -> str | None:
        """The hub's commit; None for a folder."""
        return self.facts["commit"]

    @property
    def size(self) -> Size:
        """The encoder's shape."""
        return Size(**self.facts["size"])

    def check(self) -> None:
        """Verify the checksums of its files.

        Raises:
            UserError: if they differ.
        """
        reason = self.damage()  # unlike `checked`, this fails if the file of checksums is missing
        if reason is not None:
            raise UserError(
                f"{self.folder}: {reason}. Delete this folder and run again to rebuild it from {self.source}."
            )

    def weights(self) -> StoredTensors:
        """Open its weights, by Hugging Face name."""
        from mlmclm.models.stored_tensors import StoredTensors

        return StoredTensors(self.folder / "model.safetensors")


class StoredSource(FolderArtifact):
    """Configuration and tokenizer of a given model, in the store under the hash of the model's content."""

    kind = "given models"
    part = "initial/sources"
    again = "`mlmclm pretrain` on its study, after it is deleted"


@dataclass(frozen=True)
class Wanted:
    """A study's `initial` and `tokenizer` settings, with everything needed to resolve them."""

    initial: Mapping[str, str]
    """Folder or hub name of each initial model, by the study's name for it."""
    used: frozenset[str]
    """Sizes that the study's models use."""
    tokenizer: TokenizerConfig | None
    """The study's tokenizer setting; None takes the tokenizer of the initial models."""
    block_length: int
    """Length in tokens of the longest sequence that the models will see."""
    store: Path
    data_root: Path | None = None
    beside: Path | None = None
    """The study file's folder, in which paths are looked up first."""


@dataclass(frozen=True)
class Beginning:
    """The resolved tokenizer and initial models of a study."""

    tokenizer: TokenizerConfig
    models: dict[str, StoredInitial]
    """Initial models by the study's names for them."""


@dataclass(frozen=True)
class _Source:
    """A folder or hub name, with what is known about it without reading its weights."""

    text: str
    content: str
    """SHA-256 of configuration, weights and tokenizer."""
    commit: str | None
    """The hub's commit; None for a folder."""
    files: Path
    """A folder that holds config.json and the tokenizer."""


def prepare_initial(wanted: Wanted) -> Beginning:
    """Return the models that a study starts from, after adding to the store those that are missing.

    Raises:
        UserError: if a folder does not exist, an architecture is not supported, sequences are too long, or the
            tokenizer is not the model's.
        EnvironmentFault: if the hub cannot be reached or the disk is full.
    """
    sources = {name: _look(source, wanted) for name, source in wanted.initial.items()}
    chosen, encoders = _resolved(sources, wanted, pin=True)
    for name, stored in encoders.items():
        make = partial(_make, name, sources[name], chosen, wanted)
        stored.ensure(make, read=False, title=f"{name}'s encoder")
    return Beginning(chosen, {name: stored.opened() for name, stored in encoders.items()})


def find_initial(wanted: Wanted) -> Beginning | None:
    """Return the result of `prepare_initial` if the store has everything already, else None; same errors."""
    known = {name: _known_source(source, wanted) for name, source in wanted.initial.items()}
    sources = {name: source for name, source in known.items() if source is not None}
    if len(sources) < len(known):
        return None
    chosen, encoders = _resolved(sources, wanted)
    if any(stored.damage(read=False) for stored in encoders.values()):
        return None
    return Beginning(chosen, {name: stored.opened() for name, stored in encoders.items()})


def check_initial(wanted: Wanted, *, masked: bool) -> None:
    """Raise the errors that `prepare_initial` would raise, without writing into the store.

    The weights of a folder are read. For a hub name that is not in the store, only config.json is fetched, so problems
    with its weights or tokenizer show up later.
    """
    from mlmclm.models.folder import load_tokenizer
    from mlmclm.models.given import encoder_config, encoder_size, read_initial

    data_root, beside = wanted.data_root, wanted.beside
    sources: dict[str, _Source] = {}
    for name, source in wanted.initial.items():
        recorded = _known_source(source, wanted)
        if recorded is not None:
            sources[name] = recorded
        else:
            folder = fetch_config(source, data_root, beside)
            encoder_size(encoder_config(folder))
            _check(name, source, folder, wanted)
    if not sources:
        return
    chosen, encoders = _resolved(sources, wanted)
    # Tokenizers are prepared into a store; a scratch one keeps the real one untouched.
    with TemporaryDirectory() as scratch:
        prepared = prepare_tokenizer(chosen, store=Path(scratch))
        check_special(prepared, masked=masked)
        for name, stored in encoders.items():
            existing = local_folder(wanted.initial[name], data_root, beside)
            if existing is not None and stored.damage(read=False) is not None:
                read_initial(existing, load_tokenizer(prepared))


def first_config(size: str, initial: StoredInitial | None, tokenizer: Path, recipe: Recipe) -> PreTrainedConfig:
    """Return the configuration under which a model is trained.

    Args:
        recipe: the recipe with the settings of the model's phase. Its block length is used only for a model that starts from random weights.

    Raises:
        UserError: the recipe has a RoPE base for a model without rotary positions.
    """
    from mlmclm.models.architectures import set_rope
    from mlmclm.models.build import load_prepared_tokenizer, model_config
    from mlmclm.models.folder import read_config

    if initial is None:
        config = model_config(size, load_prepared_tokenizer(tokenizer), recipe.block_length)
    else:
        config = read_config(initial.folder)
    set_rope(config, recipe.rope_base, recipe.local_rope_base)
    return config


def source_sizes(
    initial: Mapping[str, str], data_root: Path | None = None, beside: Path | None = None
) -> dict[str, Size]:
    """Return the models' shapes, from config.json alone. The vocabulary does not include tokens still to be added.

    Raises:
        UserError: if a folder does not exist or an architecture is not supported.
        EnvironmentFault: if the hub cannot be reached.
    """
    from mlmclm.models.given import encoder_config, encoder_size

    return {
        name: encoder_size(encoder_config(fetch_config(source, data_root, beside))) for name, source in initial.items()
    }


def check_architecture(model_type: str, recipe: Recipe) -> None:
    """Check that the architecture can isolate documents and round its residual stream if the recipe asks for it.

    Raises:
        UserError: if it cannot; the message names the architectures that can.
    """
    from mlmclm.models.architectures import ARCHITECTURES

    if recipe.isolates and not ARCHITECTURES[model_type].isolates:
        able = ", ".join(name for name, architecture in ARCHITECTURES.items() if architecture.isolates)
        asked, instead = (
            ("rows: chunks", "rows: joined") if recipe.rows == "chunks" else ("isolate_documents", "set it to false")
        )
        raise UserError(
            f"recipe.{asked}: {model_type!r} models can't keep the documents of a batch apart; {instead}, or use one of: {able}."
        )
    if recipe.precision == "bf16-residual" and not ARCHITECTURES[model_type].residual:
        able = ", ".join(name for name, architecture in ARCHITECTURES.items() if architecture.residual)
        raise UserError(
            f"recipe.precision: bf16-residual: each layer of {model_type!r} models ends with a norm, so they have no residual "
            f"stream to keep in bf16; set it to bf16-autocast, or use one of: {able}."
        )


def shape(size: str, initial: StoredInitial | None) -> Size:
    """Return the shape of a size, or of the initial model if there is one."""
    return SIZES[size] if initial is None else initial.size


def _record(source: str, store: Path, folder: Path | None) -> Path:
    """Return the path of the record of a source's content."""
    place = source if folder is None else str(folder.resolve())
    return store / StoredSource.part / f"{stable_hash(place)[:16]}.json"


def _known_source(source: str, wanted: Wanted) -> _Source | None:
    """Return a source if it is known without a download, else None."""
    folder = local_folder(source, wanted.data_root, wanted.beside)
    if folder is not None:
        return _Source(source, _content(folder, wanted.store), None, folder)
    # The folder is gone, or the source is a hub name: look for a record of the name and of each possible path.
    for place in (None, *places_of(source, wanted.beside, wanted.data_root)):
        record = _record(source, wanted.store, place)
        if record.is_file():
            recorded = read_sealed(record, f"Delete it: {source} is then read again.")
            kept = StoredSource(wanted.store, recorded["content"]).folder
            checked(kept, None, f"Delete {kept} and {record}: {source} is then read again.")
            return _Source(source, recorded["content"], recorded["commit"], kept)
    return None


def _content(folder: Path, store: Path) -> str:
    """Return a folder's content hash: the one (by any definition) under which the store has the model, else the current one."""
    hashes = content_hashes(folder)
    return next((content for content in hashes if StoredSource(store, content).is_here()), hashes[0])


def _look(source: str, wanted: Wanted) -> _Source:
    """Return a source, fetching it and recording its content in the store if needed."""
    folder = local_folder(source, wanted.data_root, wanted.beside)
    recorded = None if folder is not None else _known_source(source, wanted)
    if recorded is not None:
        if recorded.commit is None:
            say(f"initial: {source} no longer exists; the store's copy is used.")
        return recorded
    fetched = fetch_source(source, wanted.data_root, wanted.beside)
    files = Unchanged(fetched, holds=lambda: content in content_hashes(fetched))
    content = _content(fetched, wanted.store)
    commit = fetched.name if folder is None else None  # the hub's cache names each snapshot folder after its commit

    def make(temporary: Path) -> None:
        for name in ("config.json", NOTES, *TOKENIZER_FILES):
            if (fetched / name).is_file():
                shutil.copy(fetched / name, temporary / name)
        files.check()

    kept = StoredSource(wanted.store, content).ensure(make, title=source)
    write_sealed(_record(source, wanted.store, folder), {"source": source, "content": content, "commit": commit})
    return _Source(source, content, commit, kept)


def _resolved(
    sources: Mapping[str, _Source], wanted: Wanted, *, pin: bool = False
) -> tuple[TokenizerConfig, dict[str, StoredInitial]]:
    """Return the study's tokenizer, and its initial models' encoders in the store, by model name.

    A tokenizer of the Hub is read at the commit that the store has pinned. With `pin`, the current commit is pinned if
    there is none. Raises the errors of `_tokenizer`, `_check` and `HubRepository.pin`.
    """
    chosen = _tokenizer(sources, wanted.tokenizer)
    if chosen.name is not None:
        repository = repository_of(chosen.name, chosen.revision)
        commit = repository.pin(wanted.store) if pin else repository.pinned(wanted.store)
        chosen = chosen.model_copy(update={"revision": commit or chosen.revision})
    for name, source in sources.items():
        _check(name, source.text, source.files, wanted)
    return chosen, {
        name: StoredInitial(
            wanted.store, stable_hash([versions.INITIAL_MODELS, sources[name].content, tokenizer_key(chosen, "")])
        )
        for name in sorted(wanted.used & sources.keys())
    }


def _check(name: str, source: str, folder: Path, wanted: Wanted) -> None:
    """Raise a `UserError` if sequences are longer than a model has positions."""
    most = longest(read_json(folder / "config.json"))
    if most is not None and wanted.block_length > most:
        raise UserError(
            f"recipe.block_length {wanted.block_length}: {name!r} ({source}) was made for {most} positions at most; use shorter blocks."
        )


def _tokenizer(sources: Mapping[str, _Source], chosen: TokenizerConfig | None) -> TokenizerConfig:
    """Return the study's tokenizer, which is that of its initial models if there are any.

    Raises:
        UserError: if the initial models have different tokenizers, the study trains one although it has initial models,
            or there is none.
    """
    if not sources:
        if chosen is None:
            raise UserError("key 'tokenizer' is missing.")
        return chosen
    parts = {name: _tokenizer_parts(source) for name, source in sources.items()}
    first, *others = parts
    for other in others:
        if parts[other] != parts[first]:
            raise UserError(
                f"initial: {first!r} ({sources[first].text}) and {other!r} ({sources[other].text}) have different tokenizers, but the "
                "models of a study share corpus and tokenizer. Make a study of each."
            )
    # Take the copy in the store, which stays the same when the source is gone or has changed.
    copied = TokenizerConfig(path=str(sources[first].files))
    if chosen is None or (chosen.path or chosen.name) in {source.text.partition("@")[0] for source in sources.values()}:
        return copied
    if chosen.train_vocab_size is not None:
        raise UserError(
            f"tokenizer.train_vocab_size: {first!r} continues from {sources[first].text}, whose tokenizer it must have. Leave "
            "'tokenizer' out."
        )
    return chosen


def _tokenizer_parts(source: _Source) -> str:
    """Return the parts of a tokenizer that determine how it encodes a text, as one string."""
    content: dict[str, Any] = read_json(source.files / TOKENIZER_FILES[0])
    return canonical_json([content.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")])


def _make(name: str, source: _Source, tokenizer: TokenizerConfig, wanted: Wanted, folder: Path) -> None:
    """Read the source's weights and write the encoder into a folder."""
    from mlmclm.models.folder import load_tokenizer
    from mlmclm.models.given import encoder_size, read_initial, write_initial

    say(f"{name}: making an encoder from {source.text}")
    prepared = prepare_tokenizer(tokenizer, store=wanted.store)
    # A hub name may point to a newer commit by now, so ask for the recorded one.
    pinned = source.text if source.commit is None else f"{source.text.partition('@')[0]}@{source.commit}"
    weights = fetch_source(pinned, wanted.data_root, wanted.beside)
    files = Unchanged(weights, holds=lambda: source.content in content_hashes(weights))
    if source.content not in content_hashes(weights):
        raise UserError(f"{weights}: it has changed since it was first read; run the same command again.")
    initial = read_initial(weights, load_tokenizer(prepared))
    write_initial(folder, initial)
    files.check()
    title = source.text if source.commit is not None else weights.resolve().name
    size = asdict(encoder_size(initial.config))
    facts = {"source": title, "content": source.content, "commit": source.commit, "size": size}
    write_json(folder / "initial.json", facts)
