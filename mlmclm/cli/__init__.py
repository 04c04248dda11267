"""The command line: one file a verb; parse, call, print."""
