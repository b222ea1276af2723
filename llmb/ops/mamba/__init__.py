"""Mamba-2: causal convolution, SSD scan, state update."""
