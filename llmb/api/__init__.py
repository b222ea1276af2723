"""Implementation of the Python API; import its names from `llmb`."""
