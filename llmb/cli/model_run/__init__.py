"""Runs of a model from its Hugging Face folder or config.json, without a recipe of its own."""
