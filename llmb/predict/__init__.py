"""The performance model: time and memory of a run before it is run, and the search for a better configuration."""
