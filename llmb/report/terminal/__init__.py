"""What only a terminal shows: a progress bar, colours, times as people read them. Rich is imported only for these."""
