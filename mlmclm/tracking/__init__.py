"""A study's runs and charts, and their writers to MLflow and other trackers: the only package that calls MLflow.

`records` and `views` define how a study appears in MLflow, `experiment` opens it, and a `Writer` writes the records.
"""
