"""What to expect of a run, and whether measured figures are possible."""
