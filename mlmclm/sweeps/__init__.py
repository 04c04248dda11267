"""The grid of model x task x learning rate x seed: its space, its cells, the ledger of results, and the Ray Tune
run."""
