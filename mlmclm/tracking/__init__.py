"""The one place that talks to MLflow."""
