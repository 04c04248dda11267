"""A pair of models as in Ettin, at small scale:  python -m benchmarks.pair --data FOLDER [--steps N] [--store FOLDER]

One recipe trains an encoder and a decoder through three phases (short blocks, longer blocks with a larger RoPE base, decay),
and each is then trained with the other's objective (arXiv 2507.11412). All are fine-tuned on sentiment, entailment and
retrieval, and answer two tasks as they are: the last word of a passage, and Winogender. FOLDER holds enwiki2015/, wikitext2/,
sst2/, sick/, reqa_squad/ and winogender/ as Parquet. The table is that of the study's report.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.results import machine, write_section
from mlmclm.plans.names import format_steps
from mlmclm.reports.paired_models import MADE

SHORT, LONG, BATCH = 128, 512, 32
TASKS = ("sst2", "sick", "reqa_squad")
PASSAGES, WORDS = 400, 60
LAST_WORD = {
    "task": "last_word",
    "dataset_path": "parquet",
    "dataset_kwargs": {"data_files": {"test": "last_words.parquet"}},
    "output_type": "loglikelihood",
    "test_split": "test",
    "doc_to_text": "{{context}}",
    "doc_to_target": "{{' ' + word}}",  # the harness puts nothing before it
    "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
}


def write_last_words(folder: Path, articles: Path) -> None:
    """Write the task of guessing the word after `WORDS` words of an article of WikiText-2's test part."""
    rows: dict[str, list[str]] = {"context": [], "word": []}
    for text in pq.read_table(articles)["text"].to_pylist():
        words = re.sub(r"\s+", " ", text).split()
        for start in range(0, len(words) - WORDS, 10 * WORDS):
            # A word of three letters or more that the passage has once already, as in LAMBADA.
            window = words[start : start + 2 * WORDS]
            place = next(
                (n for n in range(WORDS, len(window)) if window[n].isalpha() and len(window[n]) > 2 and window[n] in window[:n]),
                None,
            )  # fmt: skip
            if place is not None and len(rows["word"]) < PASSAGES:
                rows["context"].append(" ".join(window[:place]))
                rows["word"].append(window[place])
    pq.write_table(pa.table(rows), folder / "last_words.parquet")
    (folder / "last_word.yaml").write_text(yaml.safe_dump(LAST_WORD), encoding="utf-8")


def study(folder: Path, data: Path, steps: int) -> tuple[Path, list[str]]:
    """Write the study; return its file and its models."""
    extended, decayed = steps + steps // 8, steps + steps // 5
    crossed = decayed + steps // 5
    ends = {name: format_steps(end) for name, end in {"ext": extended, "decay": decayed, "cross": crossed}.items()}
    encoder, decoder = f"2m-mlm30-{ends['ext']}-mlm15-{ends['decay']}", f"2m-clm-{ends['decay']}"
    models = [encoder, decoder, *(f"{decoder}-{last}-{ends['cross']}" for last in ("mlm15", "mntp15"))]
    models.append(f"{encoder}-clm-{ends['cross']}")
    last_token = {"attention": "causal", "pooling": "last"}
    write_last_words(folder, data / "wikitext2" / "test.parquet")
    content = {
        "name": "pair",
        "models": models,
        "corpus": {"source": "enwiki2015", "max_tokens": crossed * BATCH * SHORT + 2**18},
        "tokenizer": {"train_vocab_size": 4096},
        "recipe": {
            "block_length": SHORT, "batch": BATCH, "peak_learning_rate": 3e-3, "adam_eps": 1e-8, "workers": 2, "device": "cpu",
            "phases": [
                {"name": "pretrain", "steps": steps, "warmup_steps": 60, "batch_warmup": {"steps": steps // 10, "first": 8}},
                {"name": "ext", "steps": extended - steps, "block_length": LONG, "batch": BATCH * SHORT // LONG,
                 "rope_base": 160_000, "decay": "1-sqrt", "final_share": 0.5},
                {"name": "decay", "steps": decayed - extended, "peak_learning_rate": 1.5e-3, "decay": "1-sqrt", "final_share": 0.04},
                {"name": "cross", "steps": crossed - decayed, "warmup_steps": 20, "decay": "linear", "final_share": 0.02,
                 "moments": "new"},
            ],
        },
        "space": "english",
        "tasks": list(TASKS),
        "per_model": {decoder: last_token, models[-1]: last_token},
        "zero_shot": {"tasks": ["last_word.yaml"], "winogender": str((data / "winogender").resolve())},
    }  # fmt: skip
    path = folder / "pair.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path, models


def main() -> None:
    """Runs the study and writes its pairs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1600, help="steps of 32 x 128 tokens in the first phase")
    parser.add_argument("--store", type=Path, help="folder to keep everything in; a second run goes on from there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        store = options.store or Path(temporary) / "store"
        store.mkdir(parents=True, exist_ok=True)
        path, models = study(store, options.data, options.steps)
        command = ["-m", "mlmclm", "study", path, "--store", store, "--data", options.data]
        subprocess.run([sys.executable, *map(str, command)], check=True)
        folder = store / "studies" / "pair"
        pairs, zero_shot = pd.read_csv(folder / "pairs.csv"), pd.read_csv(folder / "zero_shot.csv")
    lines = [
        f"Command: `python -m benchmarks.pair --data FOLDER --steps {options.steps}`. Machine: {machine()}.",
        f"Models {', '.join(models)}: {options.steps:,} steps of {BATCH} x {SHORT} tokens of enwiki2015, then blocks of {LONG} with RoPE "
        "base 160,000, then decay; the other objective last. Three seeds at the best of three rates; decoders are fine-tuned with "
        "causal attention and the last token. Points out of 100, with 95 % intervals.",
        "",
        f"| task | metric | {' | '.join(MADE)} |",
        f"|---|---|{'---|' * len(MADE)}",
    ]
    seen = []
    for (task, kind, metric), rows in pairs.groupby(["task", "kind", "metric"], sort=False):
        scores = {row.made: row for row in rows.itertuples()}
        cells = {
            made: f"{_number(row.score)} [{_number(row.low)}, {_number(row.high)}]" for made, row in scores.items()
        }
        lines.append(f"| {task} ({kind}) | {metric} | {' | '.join(cells.get(way, '') for way in MADE)} |")
        if task != "winogender":
            seen.append(f"{task}: {_direction(scores['encoder'], scores['decoder'], of='last_word' not in task)}")
    lines += [
        "",
        f"Ettin's directions at this size (paper: encoders ahead but on generative tasks). {'; '.join(seen)}.",
    ]
    kept = ("perplexity", "masculine", "neutral", "feminine", "correlation")
    found = zero_shot.pivot(index=["model", "scoring"], columns="metric", values="score").loc[:, list(kept)]
    lines += [
        "",
        "Perplexity of the last words, and Winogender: shares of the pronouns taken, and correlation with the labour statistics.",
        "",
        f"| model | scoring | {' | '.join(kept)} |",
        f"|---|---|{'---|' * len(kept)}",
    ]
    for (model, scoring), row in found.iterrows():
        lines.append(f"| {model} | {scoring} | {' | '.join(f'{value:.3g}' for value in row)} |")
    write_section("A pair of encoder and decoder", lines)


def _direction(encoder: Any, decoder: Any, *, of: bool) -> str:
    """Say whether the published direction is seen; `of` is whether the encoder is ahead there."""
    first, second = (encoder, decoder) if of else (decoder, encoder)
    apart = first.low > second.high or second.low > first.high
    return f"{'seen' if first.score > second.score else 'not seen'}{'' if apart else ', within the intervals'}"


def _number(value: float) -> str:
    return f"{value * 100:.1f}" if abs(value) <= 1 else f"{value:.4g}"


if __name__ == "__main__":
    main()
