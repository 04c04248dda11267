"""The one place that talks to MLflow, and the one place that defines live metrics.

`records` and `views` say what a study looks like in MLflow, `Tracker` exports it without ever holding up the work,
`check_address` says whether an address answers, `metrics` defines what Prometheus sees while something runs.
"""
