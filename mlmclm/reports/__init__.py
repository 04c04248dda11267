"""Figures, HTML, model cards."""
