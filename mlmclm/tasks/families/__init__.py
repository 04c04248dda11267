"""The task families of this package: a `Family` and the `PreparedTask` of its tasks, in a file of their own."""
