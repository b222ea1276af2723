"""Dense decoders like Llama as Hugging Face publishes them, one file of data each."""
