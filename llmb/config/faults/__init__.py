"""Faults that a run injects on purpose: their plan, and the files and rates they come from."""
