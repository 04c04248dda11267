"""The demonstration corpus and its four tasks, made from the documentation of the installed Python packages."""
