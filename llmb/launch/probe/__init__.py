"""Processes that measure this machine for `llmb-run probe`."""
