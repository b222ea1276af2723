"""Model architectures, their blocks and their Hugging Face weights."""
