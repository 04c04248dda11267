"""Optimisers of pretraining and of fine-tuning. `optimizer` has their interface, `rules` the built-in ones."""
