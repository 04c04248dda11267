"""The demonstration corpus and its four tasks, made of the documentation of the Python packages that are installed."""
