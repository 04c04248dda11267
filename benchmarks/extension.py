"""The effect of a longer context:  python -m benchmarks.extension --data FOLDER [--steps N] [--store FOLDER]

Models are pretrained on blocks of 128 tokens and extended to 1,024, with the RoPE base of their pretraining and with Ettin's
larger one (arXiv 2507.11412). FOLDER holds enwiki2015/ as Parquet. The exported models are loaded by transformers; their
loss on held-out blocks of 1,024 tokens, before and after the extension, is averaged for each position of the predicted token.

The masked models are then fine-tuned to find an article by 24 words that were cut out of it, between its 350th and 450th word
(an inverse cloze task, Lee et al., arXiv 1906.00300): a model that reads 128 tokens never sees what stood around them.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as functional
import yaml
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from benchmarks.results import machine, write_section
from mlmclm.corpora.tokenizer import special_ids
from mlmclm.plans.names import format_steps
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import find_prepared
from mlmclm.studies.study_file import load_study

SHORT, LONG, BATCH = 128, 1024, 32
BASES = {"same base, 10,000": None, "base 160,000": 160_000}
PARTS = ((0, 128), (128, 512), (512, 1024))
BLOCKS, RATIO = 48, 0.3
BIN = 64
"""Number of positions that a point of the figure averages."""
FIGURE = Path(__file__).with_name("extension.png")
WORDS, QUERY, CUT = 520, 24, (350, 450)
"""Words of a document and of a query, and where in the document a query is cut out."""
TRAIN, TEST = 1200, 300
TASK = {
    "name": "cut_out", "family": "retrieval", "title": "Articles by words cut out of them", "source": "enwiki2015",
    "folder": "cut_out", "columns": {"id": "_id", "query_id": "query-id", "corpus_id": "corpus-id"},
    "splits": {
        "train": "train",
        "validation_fraction": TEST / (TRAIN + TEST),
        "test": {"queries": "queries", "corpus": "corpus", "qrels": "qrels"},
    },
    "metric": "ndcg@10", "licence": "CC BY-SA 3.0", "citation": "none",
}  # fmt: skip
SPACE = {
    "tasks": ["cut_out"],
    "learning_rates": [1e-3],
    "seeds": [0, 1, 2],
    "protocol": {"base": "standard", "batch_size": 16, "max_steps": 100, "max_length": LONG},
}


def study(folder: Path, name: str, base: int | None, steps: int) -> tuple[Path, list[str]]:
    """Write a study of both objectives; return its file and its models."""
    longer = steps // 5
    extension = {
        "name": "ext",
        "steps": longer,
        "block_length": LONG,
        "batch": BATCH * SHORT // LONG,
        "decay": "1-sqrt",
        "final_share": 0.1,
    }
    pretraining = {"name": "pretrain", "steps": steps, "warmup_steps": 60}
    models = [
        f"2m-{objective}-{format_steps(end)}" for objective in ("clm", "mlm30") for end in (steps, steps + longer)
    ]
    content = {
        "name": name,
        "models": models,
        "corpus": {"source": "enwiki2015", "max_tokens": (steps + longer) * BATCH * SHORT + 2**18},
        "tokenizer": {"train_vocab_size": 4096},
        "space": "english",  # pretraining uses no task of it
        "recipe": {
            "block_length": SHORT, "batch": BATCH, "peak_learning_rate": 3e-3, "adam_eps": 1e-8, "workers": 2, "device": "cpu",
            "phases": [pretraining, extension if base is None else {**extension, "rope_base": base}],
        },
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path, models


@torch.no_grad()
def losses(folder: Path, blocks: np.ndarray, *, causal: bool, mask: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed loss in nats, and the number of predictions, at each position: [`LONG`] each."""
    sums, counts = np.zeros(LONG), np.zeros(LONG)
    model = (AutoModelForCausalLM if causal else AutoModelForMaskedLM).from_pretrained(
        folder / "decoder" if causal else folder
    )
    model.eval()
    hidden = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(0)) < RATIO
    for row, hides in zip(torch.from_numpy(blocks), hidden, strict=True):
        if causal:
            values = functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="none")
            positions = np.arange(1, len(row))
        else:
            logits = model(torch.where(hides, mask, row)[None]).logits[0]
            values = functional.cross_entropy(logits[hides], row[hides], reduction="none")
            positions = np.flatnonzero(hides.numpy())
        sums[positions] += values.numpy()
        counts[positions] += 1
    return sums, counts


def mean(loss: tuple[np.ndarray, np.ndarray], first: int, last: int) -> float:
    """Return the mean loss at the positions from `first` to before `last`."""
    sums, counts = loss
    return float(sums[first:last].sum() / counts[first:last].sum())


def draw(losses_by_model: Mapping[tuple[str, str], tuple[np.ndarray, np.ndarray]], articles: pd.DataFrame) -> None:
    """Draw a panel of losses for each objective, and one of retrieval with its 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    objectives = list(dict.fromkeys(objective for objective, _ in losses_by_model))
    figure, axes = plt.subplots(1, len(objectives) + 1, figsize=(15, 3.8))
    firsts = np.arange(0, LONG, BIN)
    for axis, objective in zip(axes, objectives, strict=False):
        for (trained, way), loss in losses_by_model.items():
            if trained == objective:
                line = [mean(loss, first, first + BIN) for first in firsts.tolist()]
                axis.plot(firsts + BIN / 2, line, label=way, linestyle=":" if way == "before" else "-")
        axis.axvline(SHORT, color="gray", linewidth=0.8)
        axis.set_title(objective)
        axis.set_xlabel("position of the predicted token")
    axes[0].set_ylabel("loss, nats")
    axes[0].legend(fontsize=8)
    around = [articles["score"] - articles["score_low"], articles["score_high"] - articles["score"]]
    axes[-1].bar(articles.index, articles["score"], yerr=around, capsize=4, color="tab:gray")
    axes[-1].set_title("articles found by words cut out of them")
    axes[-1].set_ylabel("NDCG@10")
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=110)


def write_retrieval(folder: Path, articles: Path) -> None:
    """Write the task and its space: pairs of a query and the article that it was cut out of."""
    texts = [text.split() for text in pq.read_table(articles)["text"].to_pylist()]
    chance = random.Random(0)
    rows: list[dict[str, str]] = []
    for words in texts:
        if len(words) >= WORDS + QUERY and len(rows) < TRAIN + 2 * TEST:
            start = chance.randrange(*CUT)
            end = start + QUERY
            kept = [*words[:start], *words[end : WORDS + QUERY]]
            rows.append({"query": " ".join(words[start:end]), "positive": " ".join(kept)})
    test = rows[-TEST:]
    names = [str(number) for number in range(TEST)]
    parts: dict[str, list[dict[str, Any]]] = {
        "train": rows[:-TEST],
        "queries": [{"_id": name, "text": row["query"]} for name, row in zip(names, test, strict=True)],
        "corpus": [{"_id": name, "text": row["positive"]} for name, row in zip(names, test, strict=True)],
        "qrels": [{"query-id": name, "corpus-id": name, "score": 1} for name in names],
    }
    (folder / "cut_out").mkdir()
    for part, lines in parts.items():
        pq.write_table(pa.Table.from_pylist(lines), folder / "cut_out" / f"{part}.parquet")
    (folder / "cut_out.yaml").write_text(yaml.safe_dump(TASK), encoding="utf-8")
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE), encoding="utf-8")


def retrieval(folder: Path, models: Mapping[str, Path], short: Sequence[str], store: Path) -> pd.DataFrame:
    """Fine-tune the models, those in `short` on 128 tokens of a document; return their rows of the study's best.csv."""
    content = {
        "name": "extension-retrieval",
        "models": {name: str(path) for name, path in models.items()},
        "space": "space.yaml",
        "device": "cpu",
        "per_model": {name: {"max_length": SHORT, "stride": SHORT // 4} for name in short},
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    words = ("sweep", folder / "sweep.yaml", "--store", store, "--data", folder, "--task-dir", folder, "--replace")
    subprocess.run([sys.executable, "-m", "mlmclm", *map(str, words)], check=True)
    best: pd.DataFrame = pd.read_csv(store / "studies" / "extension-retrieval" / "best.csv").set_index("model")
    return best.loc[list(models)]


def main() -> None:
    """Train, measure, and write the section of RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000, help="steps of 32 x 128 tokens before the extension")
    parser.add_argument("--store", type=Path, help="folder to keep the models in; a second run takes them from there")
    options = parser.parse_args()
    rows, steps = [], options.steps
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        store = options.store or place / "store"
        folders: dict[tuple[str, str], Path] = {}
        for number, (title, base) in enumerate(BASES.items()):
            file, models = study(place, f"extension{number}", base, steps)
            words = ("pretrain", file, "--store", store, "--data", options.data)
            subprocess.run([sys.executable, "-m", "mlmclm", *map(str, words)], check=True)
            folders |= {
                (title, model): (store / "studies" / file.stem / "models" / model).resolve() for model in models
            }
        prepared = find_prepared(load_study(file), Place(store, options.data))
        assert prepared is not None
        corpus = prepared.corpus.sources[""]
        held_out = corpus.validation.at_length(LONG)
        blocks = held_out.take(np.arange(min(len(held_out), BLOCKS)))
        mask = special_ids(corpus.tokenizer)["mask"]
        before, after = (f"2m-mlm30-{format_steps(end)}" for end in (steps, steps + steps // 5))
        encoders = {
            "before": folders[next(iter(BASES)), before],
            "base-160k-128": folders["base 160,000", after],
            "same-base": folders["same base, 10,000", after],
            "base-160k": folders["base 160,000", after],
        }
        write_retrieval(place, options.data / "enwiki2015" / "train.parquet")
        short = ("before", "base-160k-128")
        articles = retrieval(place, encoders, short, store)
        losses_by_model: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}
        for objective in ("clm", "mlm30"):
            before, after = (f"2m-{objective}-{format_steps(end)}" for end in (steps, steps + steps // 5))
            ways = {"before": folders[next(iter(BASES)), before], **{title: folders[title, after] for title in BASES}}
            for way, folder in ways.items():
                loss = losses(folder, blocks, causal=objective == "clm", mask=mask)
                losses_by_model[objective, way] = loss
                rows.append(f"| {objective} | {way} | {' | '.join(f'{mean(loss, *part):.3f}' for part in PARTS)} |")
    draw(losses_by_model, articles)
    heads = " | ".join(f"{first}-{last - 1}" for first, last in PARTS)
    lines = [
        f"Command: `python -m benchmarks.extension --data FOLDER --steps {steps}`. Machine: {machine()}.",
        f"Size 2m, {steps:,} steps of {BATCH} x {SHORT} tokens of enwiki2015, then {steps // 5:,} of {BATCH * SHORT // LONG} x {LONG:,}. Loss in nats "
        f"on {len(blocks)} held-out blocks of {LONG:,} tokens by position of the predicted token, of transformers' own models.",
        "",
        f"![loss by position, and retrieval]({FIGURE.name})",
        "",
        f"| objective | model | {heads} |",
        f"|---|---|{'---|' * len(PARTS)}",
        *rows,
        "",
        f"Retrieval of {TEST} articles of {WORDS} words by {QUERY} words cut out of them, {TRAIN:,} for training, 100 steps of 16 pairs, NDCG@10 "
        "over three seeds with 95 % intervals; models of mlm30.",
        "",
        "| model | tokens read | NDCG@10 |",
        "|---|---|---|",
        *(
            f"| {name} | {SHORT if name in short else LONG:,} | {100 * row.score:.1f} [{100 * row.score_low:.1f}, {100 * row.score_high:.1f}] |"
            for name, row in articles.iterrows()
        ),
    ]
    write_section("Extension of the context", lines)


if __name__ == "__main__":
    main()
