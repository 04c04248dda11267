"""Scores and results that other tools have written, one reader per format."""
