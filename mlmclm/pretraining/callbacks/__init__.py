"""Callbacks of the training loop, one per file. `callback.py` has their interface."""
