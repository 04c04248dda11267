"""A study from its file to its report."""
