"""MLP activations: SwiGLU, GELU and their fp8 fusions."""
