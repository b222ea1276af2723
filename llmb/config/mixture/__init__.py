"""Decoders with a mixture of experts as Hugging Face publishes them, one file each."""
