"""MLflow tracking: the only package that calls MLflow.

`records` and `views` define how a study appears in MLflow. `Tracker` exports it without ever blocking the work.
"""
