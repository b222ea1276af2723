"""Restarts of a failed run from its newest checkpoint."""
