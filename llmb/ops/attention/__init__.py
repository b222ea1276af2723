"""Attention: training, paged KV cache, MLA."""
