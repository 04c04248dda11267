"""Kinds of devices, and the user's choices among them and their backends. Needs no torch."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]
Choice = Literal["auto", "cpu", "cuda"]

BACKEND = "MLMCLM_BACKEND"
"""Variable for the user's choice of a backend (`mlmclm.backends`), which workers follow."""
