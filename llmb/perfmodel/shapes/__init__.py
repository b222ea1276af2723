"""Shapes of models that are predicted: by name, or from a Hugging Face config.json."""
