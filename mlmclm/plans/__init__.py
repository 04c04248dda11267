"""Names and their grammar, plans, and the study file."""
