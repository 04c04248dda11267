"""CPUs, by loops that numba compiles."""
