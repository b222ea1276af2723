"""Attention with logit softcap: plain, Triton kernels, their tiles."""
