"""Pretraining of a stage on Ray Train: DeepSpeed engine, worker loop, callbacks, states and checkpoints."""
