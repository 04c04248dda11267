"""Other trackers than MLflow, one file each: functions that write a whole study's runs (`registry.KINDS`)."""
