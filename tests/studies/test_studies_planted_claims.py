"""Real studies with a known answer: one recipe's objective is damaged, and two recipes are the same under two names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OBJECTIVES = '''
from dataclasses import dataclass

import mlmclm
from mlmclm.objectives.clm import Causal


@mlmclm.register("objective")
@dataclass(frozen=True)
class Twin(Causal):
    """CLM under another name."""

    name = "twin"
    examples = ("twin",)


@mlmclm.register("objective")
@dataclass(frozen=True)
class Shuffled(Causal):
    """CLM whose labels are those of other positions: nothing can be learned but how frequent tokens are."""

    name = "shuffled"
    examples = ("shuffled",)

    def label(self, tokens, draw):
        inputs, labels = super().label(tokens, draw)
        return inputs, labels[::-1, ::-1].copy()
'''
STUDY = """
name: planted
models: [1m-clm-500, 1m-twin-500, 1m-shuffled-500]
corpus: {source: pydocs, max_tokens: 1_100_000}
tokenizer: {train_vocab_size: 4096}
recipe: {block_length: 128, batch: 16, peak_learning_rate: 4.0e-3, adam_eps: 1.0e-8, warmup_steps: 60, decay_steps: 200, workers: 2,
  device: cpu, evaluation_blocks: 64}
space:
  tasks: [pydocs-kind, pydocs-fields]
  learning_rates: [4.0e-3]
  seeds: [0, 1, 2]
  protocol: {batch_size: 16, max_steps: 80, max_length: 128, max_evaluation_examples: 400}
claims: [own.yaml]
"""
CLAIMS = """
source: this test
claims:
  clean-over-damaged: {says: Labels of the right positions are better., first: {objective: clm}, second: {objective: shuffled}}
  damaged-over-clean: {says: Labels of other positions are better., first: {objective: shuffled}, second: {objective: clm}}
  one-over-its-twin: {says: The first name is better., first: {objective: clm}, second: {objective: twin}}
  twin-over-the-one: {says: The second name is better., first: {objective: twin}, second: {objective: clm}}
"""
RUN = """
import json
import planted_objectives
import mlmclm

study = mlmclm.study("study.yaml", store="store")
study.run()
print(json.dumps(study.results.claims().set_index("claim")["verdict"].to_dict()))
"""


@pytest.mark.slow
def test_a_damaged_objective_is_seen_and_equal_recipes_are_not(tmp_path: Path) -> None:
    for name, text in {"planted_objectives.py": OBJECTIVES, "study.yaml": STUDY, "own.yaml": CLAIMS}.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "clean-over-damaged": "seen", "damaged-over-clean": "contradicted",
        "one-over-its-twin": "too small to tell", "twin-over-the-one": "too small to tell",
    }  # fmt: skip
