"""Sweeps over a grid of model x task x learning rate x seed: space, cells, results store, and Ray Tune run."""
