"""Measurements of `llmb-run probe` as data: what is stored, and definitions of bandwidth."""
