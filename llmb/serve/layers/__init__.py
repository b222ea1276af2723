"""Layers of a served model."""
