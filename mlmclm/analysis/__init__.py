"""Selection, stability, comparison: functions from tables to tables."""
