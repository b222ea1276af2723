"""Time of one training step, predicted from first principles with few constants."""
