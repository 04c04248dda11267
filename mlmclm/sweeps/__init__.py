"""Sweeps over a grid of model x task x learning rate x seed: space, cells, ledger of results, and Ray Tune run."""
