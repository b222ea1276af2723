"""Start a run, supervise it and name how it ended."""
