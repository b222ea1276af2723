"""Text of tuned runs."""
