"""Reading text, tokenising, packing, batch order, masking."""
