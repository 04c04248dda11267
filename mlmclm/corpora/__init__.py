"""Text to token blocks: reading, tokenising, packing, the order of every batch, and masking.

`prepare.prepare_corpus` is the way in. Importing this package, or any module in it, imports neither torch,
transformers nor datasets; what is heavy is imported where it is needed, so that a cached corpus opens in well under
a second.
"""
