"""Texts about machines: doctor and probe."""
