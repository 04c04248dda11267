"""Files in a store: written whole or not at all, with checksums, claimed by one process at a time."""
