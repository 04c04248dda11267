"""What a fine-tuning cell leaves: scores by metric, its test examples, its predictions."""
