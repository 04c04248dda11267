"""Start and stop Ray and the MLflow server; health."""
