"""Objectives, schedule, DeepSpeed engine, worker loop, checkpoints, Ray Train launch."""
