"""MLflow tracking and live metrics: the only package that calls MLflow, and the only one that defines metrics.

`records` and `views` define how a study appears in MLflow. `Tracker` exports it without ever blocking the work.
"""
