"""Starts and stops what runs beside the work: a Ray cluster of this machine, the MLflow server."""
