"""LoRA in out-of-core training: frozen weights, the state of adapters, and their export."""
