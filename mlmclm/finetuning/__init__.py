"""One cell: model, task, learning rate, seed -> scores. No Ray in it."""
