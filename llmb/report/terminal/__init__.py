"""Output for terminals only: progress bar, colours, readable times. Rich is imported only for these."""
