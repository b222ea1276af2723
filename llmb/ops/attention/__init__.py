"""Attention: training, paged KV cache, MLA, logit softcap."""
