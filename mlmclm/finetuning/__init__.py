"""Fine-tuning of one cell: model, task, learning rate and seed in, scores out. Nothing here uses Ray."""
