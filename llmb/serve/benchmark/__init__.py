"""The benchmark that drives the serving engine in its own process."""
