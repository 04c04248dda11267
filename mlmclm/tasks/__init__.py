"""One declaration a task; one file a family."""
