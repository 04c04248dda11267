"""The service of a store: Ray's head, the MLflow server and Prometheus on one machine, started and ended together."""
