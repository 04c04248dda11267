"""Transformers models: named sizes, building, attention, loading, and export to Hugging Face folders."""
