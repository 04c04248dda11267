"""MLflow tracking: the only package that calls MLflow.

`records` and `views` define how a study appears in MLflow, `experiment` opens it, and a `Writer` writes the records.
"""
