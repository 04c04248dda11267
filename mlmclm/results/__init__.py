"""Results of a fine-tuning cell: scores by metric, per-example results on the test split, and predictions."""
