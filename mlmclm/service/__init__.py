"""Services beside the work: a Ray cluster on this machine, and the MLflow server."""
