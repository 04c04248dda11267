"""Services beside the work: a Ray cluster on this machine, the MLflow server, and both together as a service."""
