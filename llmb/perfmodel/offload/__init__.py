"""Planner of out-of-core training: searches the fastest plan that fits given host and device memory."""
