"""Kernels that real shapes launch on each family of GPUs, recorded and compiled without a GPU."""
