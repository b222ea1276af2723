"""Performance model: FLOPs, memory, communication and time of a run before it runs. No torch."""
