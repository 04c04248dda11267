"""Launches on Ray: stages of pretraining on Ray Train, and tokenising on Ray Data."""
