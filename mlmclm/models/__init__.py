"""Sizes, building, attention mode, Hugging Face export."""
