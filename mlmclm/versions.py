"""Versions of what mlmclm computes. Each is part of the keys of what it names, so a new one leaves old files unused.

Increase a version whenever a change of the code gives something else for the same input. A version that also depends on
other packages stays where it is used: `pydocs` has its own, like another package's source.
"""

from __future__ import annotations

PACKAGE = "0.1.0"
"""The package's own version, as in `pyproject.toml`; in no key."""
TOKENIZERS = 1
"""Tokenizers that are trained on a text, or read from a folder or the Hub."""
CORPORA = 1
"""Blocks of the same text."""
STATES = 5
"""The arithmetic of pretraining."""
INITIAL_MODELS = 1
"""Encoders made of the same files of a given model."""
PREPARED_TASKS = 2
"""Examples of the same data and settings."""
TOKENIZER_READING = 2
"""Tokens and their spans, in the keys of folders for which these may have changed (`models.tokenizer_settings`)."""
CELLS = "4"
"""Scores of fine-tuning."""
DISTINCT_BATCHES = 2
"""Batches that have no text twice, in the keys of the cells that have such batches."""
EVALUATIONS = "3"
"""Zero-shot scores."""
WINOGENDER = 2
"""Winogender's scores of the same sentences."""
RESULTS = 1
"""The format of result files, in no key: a file with another one counts as damaged."""
