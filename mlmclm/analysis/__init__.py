"""Statistical analysis of a study: learning-rate selection, stability and model comparison, as functions of tables."""
