"""`llmb-run explain`, and the options that price a prediction."""
