"""One engine process, whatever it computes: start-up, events, signals, checkpoints, exit."""
