"""Versions of what mlmclm computes. Keys of files contain the version of the files' content, so a new version leaves old files unused.

Increase a version whenever a change of the code gives another output for the same input. A version that also depends on
other packages is defined where it is used: `pydocs` has its own, as a source of another package would.
"""

from __future__ import annotations

PACKAGE = "0.1.0"
"""The package's own version, as in `pyproject.toml`; no key contains it."""
TOKENIZERS = 1
"""Tokenizers that are trained on a text, or read from a folder or the Hub."""
CORPORA = 1
"""Blocks of tokens made from a text."""
STATES = 5
"""The arithmetic of pretraining."""
INITIAL_MODELS = 1
"""Encoders made from the files of a given model."""
PREPARED_TASKS = 2
"""Tokenised examples made from a task's data and settings."""
TOKENIZER_READING = 2
"""Tokens and their spans; only in the keys of model folders for which these may have changed (`models.tokenizer_settings`)."""
CELLS = "4"
"""Scores of fine-tuning."""
DISTINCT_BATCHES = 2
"""Batches without repeated texts; only in the keys of cells that have such batches."""
EVALUATIONS = "3"
"""Zero-shot scores."""
WINOGENDER = 2
"""Scores on Winogender."""
RESULTS = 1
"""The format of result files; no key contains it, and a file with another format counts as damaged."""
