"""Pretraining objectives, one class a file; to add one, add a file (see `objective`)."""
