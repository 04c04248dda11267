"""The task families of this package: each is one class (`mlmclm.tasks.family.Family`) in a file of its own."""
