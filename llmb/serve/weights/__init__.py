"""Weights of a served model: random, or from a Hugging Face folder."""
