"""Goodput of a run with faults, and the best checkpoint interval."""
