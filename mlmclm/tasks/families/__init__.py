"""The task families that come with the package: one file, one class each (`mlmclm.tasks.family.Family`)."""
