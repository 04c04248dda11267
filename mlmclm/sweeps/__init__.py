"""Space, cells and keys, ledger, the Tune trainable, launch."""
