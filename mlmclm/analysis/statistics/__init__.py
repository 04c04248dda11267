"""Statistics of a study, one per file: a public function from an `Analysis` to a table."""
