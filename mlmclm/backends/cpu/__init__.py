"""The CPU backend: loops compiled with numba."""
