"""The settings of continued pretraining on a user's text, from the model and the size of the text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.documents import LONGEST_DOCUMENT, open_source
from mlmclm.corpora.text_files import TEXT
from mlmclm.errors import UserError
from mlmclm.models.folder import load_tokenizer
from mlmclm.models.sizes import SIZES
from mlmclm.objectives.objective import OBJECTIVES
from mlmclm.storage.data_files import kind_of
from mlmclm.storage.files import first_there, places_of, read_json
from mlmclm.studies.place import Place
from mlmclm.studies.small_grid import count_weights

EPOCHS = 3
"""Most passes over the text: further ones of the same text add little (arXiv 2305.16264, where up to four are nearly as good as new text)."""
MOST_STEPS = 2_000
ENOUGH_STEPS = 200
"""Steps for which a small text gets a smaller batch."""
BATCHES = (32, 16, 8, 4)
LONGEST_BLOCK = 512
RATES = ((10_000_000, 5e-4), (60_000_000, 2e-4), (math.inf, 5e-5))
"""Peak learning rate for models with fewer weights than the number: well below the rates of pretraining, as the model
is trained already."""
WARMUP = 0.06
HELD_DOCUMENTS = 100
"""Documents that are held out where there are ten times as many; the loss is compared on them."""
SHARES = (0.01, 0.1)
"""The smallest and the largest share of the documents that is held out."""
SAMPLE = 200_000
"""Characters whose tokens are counted to estimate those of the whole text."""


@dataclass(frozen=True)
class TextSize:
    """The size of a text.

    Attributes:
        documents: those to train on, and those to be held out if the text has no validation files of its own.
        tokens: theirs, estimated from the characters by a sample of them.
    """

    documents: int
    tokens: int
    by_paragraph: bool
    own_validation: bool


@dataclass(frozen=True)
class Schedule:
    """How long a model is trained on a text, and in which pieces.

    Attributes:
        epochs: passes over the text, as far as its size is known.
    """

    block_length: int
    batch: int
    steps: int
    epochs: float


def schedule(tokens: int, context: int | None, steps: int | None = None) -> Schedule:
    """Return the schedule for a text of so many tokens: at most `EPOCHS` passes and `MOST_STEPS` steps, unless steps are given.

    Args:
        context: tokens that the model takes; None if it doesn't say.
    """
    block = min(LONGEST_BLOCK, context or LONGEST_BLOCK)
    # A document of a short text must not fill a block of its own.
    while block > 32 and tokens < 200 * block:
        block //= 2
    batch = next((size for size in BATCHES if EPOCHS * tokens >= ENOUGH_STEPS * size * block), BATCHES[-1])
    if steps is None:
        found = min(max(EPOCHS * tokens // (batch * block), 1), MOST_STEPS)
        digits = 10 ** max(0, len(str(found)) - 2)
        steps = found // digits * digits  # a round number, which is part of the model's name
    return Schedule(block, batch, steps, steps * batch * block / max(tokens, 1))


def own_objective(folder: Path) -> str:
    """Return the objective of a model's own kind: `clm` for a decoder, `mlm30` for an encoder."""
    config = read_json(folder / "config.json")
    name = next(iter(config.get("architectures") or ()), "")
    decoder = name.endswith("ForCausalLM") and config.get("is_causal") is not False
    return "clm" if decoder or config.get("model_type") == "modernbert-decoder" else "mlm30"


def short_name(name: str) -> str:
    """Return a model's name as a study's models can begin with it: `ModernBERT_base`."""
    short = re.sub(r"[^A-Za-z0-9._]+", "_", name).strip("._") or "model"
    taken = short in SIZES or re.fullmatch(rf"({'|'.join(OBJECTIVES)})\d*|untrained", short)
    return f"{short}_given" if taken else short


def measure_text(text: str, column: str, folder: Path, place: Place) -> TextSize:
    """Read a text once and return its size.

    Args:
        column: the column of text, in files that have columns.
        folder: of the model, whose tokenizer counts.

    Raises:
        UserError: there is no such text, or nothing in it.
    """
    by_paragraph = _by_paragraph(text, place)
    config = CorpusConfig(source=text, text_column=column, text_documents="paragraph" if by_paragraph else "file")
    documents = characters = 0
    sample: list[str] = []
    source = open_source(config, store=place.store, data_root=place.data_root)
    for document in source.train():
        if document.strip():
            documents += 1
            if characters < SAMPLE:
                sample.append(document[:SAMPLE])
            characters += len(document)
    own_validation = source.validation() is not None
    if documents < (1 if own_validation else 2):
        raise UserError(
            f"--text {text}: it has {documents} documents; at least 2 are needed, one to train on and one to hold out."
        )
    tokenizer = load_tokenizer(folder)
    ids = sum(len(own) + 1 for own in tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"])
    return TextSize(documents, max(1, round(characters * ids / sum(map(len, sample)))), by_paragraph, own_validation)


def _by_paragraph(text: str, place: Place) -> bool:
    """Return whether paragraphs of text files are documents: there are too few files to hold some out, or they are too long."""
    path = first_there(places_of(text, None, place.data_root))
    if path is None:
        return False
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    texts = [file for file in files if kind_of(file) in TEXT]
    return bool(texts) and (
        len(texts) < HELD_DOCUMENTS or any(file.stat().st_size > LONGEST_DOCUMENT for file in texts)
    )


def study_values(
    name: str,
    model: tuple[str, str],
    folder: Path,
    text: str,
    column: str,
    size: TextSize,
    planned: Schedule,
    objective: str,
    *,
    learning_rate: float | None,
    replicates: int,
) -> dict[str, Any]:
    """Return the values of the study file.

    Args:
        model: its name in the study, and its source.
        folder: the model's.
    """
    control = f"{model[0]}-untrained"
    steps = planned.steps
    named = f"{steps // 1000}k" if steps % 1000 == 0 else str(steps)
    weights = count_weights(folder)
    corpus: dict[str, Any] = {"source": text, "validation_fraction": held_share(size.documents)}
    corpus |= {"text_documents": "paragraph"} if size.by_paragraph else {}
    corpus |= {"text_column": column} if column != "text" else {}
    recipe = {
        "block_length": planned.block_length,
        "batch": planned.batch,
        "peak_learning_rate": learning_rate or next(rate for most, rate in RATES if weights < most),
        "warmup_steps": max(1, round(WARMUP * steps)) if steps > 1 else 0,
        "decay_steps": steps // 2,
        "evaluate_every": max(1, steps // 4),
    }
    values: dict[str, Any] = {
        "name": name,
        "initial": {model[0]: model[1]},
        "models": [control, f"{model[0]}-{objective}-{named}"],
    }
    values |= {"baseline": control, "corpus": corpus, "recipe": recipe}
    return values | ({"replicates": replicates} if replicates > 1 else {})


def held_share(documents: int) -> float:
    """Return the share of the documents that is held out."""
    return round(min(max(HELD_DOCUMENTS / documents, SHARES[0]), SHARES[1]), 3)
