"""Learning-rate schedules of pretraining and of fine-tuning. `decay` has the interface of a decay's shape."""
