"""Table of GPUs: peaks, memory, links and their sources, one row each."""
