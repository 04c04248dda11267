"""Runs before each build; `pyproject.toml` has everything else."""

import shutil

from setuptools import setup

# An earlier build's folder would bring modules into the wheel that were deleted since.
shutil.rmtree("build/lib", ignore_errors=True)
setup()
