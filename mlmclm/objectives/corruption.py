"""The recipe's settings for the corruption of hidden tokens."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from mlmclm.configuration import Frozen, Role


class Corruption(Frozen):
    """Shares of the hidden tokens that are masked, randomised or kept; they add up to 1. BERT uses 0.8, 0.1 and 0.1."""

    mask: Annotated[float, Role.WEIGHTS] = Field(1.0, ge=0, le=1)
    """Share replaced by the mask token."""
    random: Annotated[float, Role.WEIGHTS] = Field(0.0, ge=0, le=1)
    """Share replaced by a random token, never a special one."""
    keep: Annotated[float, Role.WEIGHTS] = Field(0.0, ge=0, le=1)
    """Share left unchanged."""

    @model_validator(mode="after")
    def _whole(self) -> Corruption:
        total = math.fsum((self.mask, self.random, self.keep))
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise ValueError(f"mask + random + keep must be 1, but is {total:g}")
        return self
