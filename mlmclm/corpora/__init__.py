"""From text to token blocks: reading, tokenising, packing, and the order of every batch.

The entry point is `prepare_corpus.prepare_corpus`. Importing this package, or any module in it, imports neither
torch, transformers nor datasets. Heavy packages are imported inside the functions that need them, so that a cached
corpus opens in well under a second.
"""
