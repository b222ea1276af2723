"""Token selection."""
