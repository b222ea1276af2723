"""Cross entropy and the accumulation of its gradient."""
