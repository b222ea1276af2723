"""Examination by `llmb-run doctor`: facts of a machine, findings, and nodes that differ."""
