"""Blocks of the paged KV cache and the sequences that hold them."""
