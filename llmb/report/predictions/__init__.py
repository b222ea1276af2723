"""Text of predictions and of what explains a measured figure."""
