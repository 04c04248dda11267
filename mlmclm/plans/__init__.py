"""Model names and their grammar, training plans, recipes, and suites."""
