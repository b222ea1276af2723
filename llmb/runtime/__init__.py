"""One process of an engine, whatever it computes: start-up, events, signals, checkpoints, exit."""
