"""Callbacks of the training loop, one a file: what happens around the steps of a stage. `callback.py` has their interface."""
