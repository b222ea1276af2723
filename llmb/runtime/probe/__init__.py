"""Measurements of `llmb-run probe` that need no model: launch latency, host memory, collectives."""
