"""A fine-tuning without its reports, for tests that call the loop themselves."""

from __future__ import annotations

from typing import Any

from mlmclm.finetuning.loop import Trained, fine_tune


def trained(*arguments: Any, **named: Any) -> Trained:
    """Run `train` to its end."""
    training = fine_tune(*arguments, **named)
    while True:
        try:
            next(training)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
