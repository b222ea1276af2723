"""RMSNorm and its fusions."""
