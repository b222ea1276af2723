"""Quantization to fp8 and NVFP4."""
