"""Models as Hugging Face's config.json and weight files describe them, without torch."""
