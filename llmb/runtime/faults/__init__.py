"""Faults that a rank injects into itself."""
