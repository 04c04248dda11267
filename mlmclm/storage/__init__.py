"""Storage of files: atomic writes, checksums, and leases that let one process at a time make a part of a store."""
