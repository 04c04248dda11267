"""MLflow tracking and live metrics: the only package that calls MLflow, and the only one that defines metrics.

`records` and `views` define how a study appears in MLflow. `Tracker` exports it without ever blocking the work.
`check_address` checks whether an address answers. `metrics` defines the live metrics that Prometheus scrapes.
"""
