"""Storage of files: atomic writes, checksums, and claims that let one process at a time make a part of a store."""
