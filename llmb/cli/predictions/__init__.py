"""`llmb-run predict`: training steps and serving."""
