"""Serving benchmark, which drives the engine in the same process."""
