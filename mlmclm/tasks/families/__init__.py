"""The task families of this package: one file per family, with its `Family` and the `PreparedTask` of its tasks."""
