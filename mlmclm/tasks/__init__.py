"""Fine-tuning tasks: one declaration per task, one file per task family."""
