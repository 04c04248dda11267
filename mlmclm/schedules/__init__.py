"""Learning-rate schedules of pretraining and of fine-tuning. `decay.Decay` is the base class of the shapes."""
