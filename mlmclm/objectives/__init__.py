"""Pretraining objectives, one class per file. To add one, add a file (see `objective`)."""
