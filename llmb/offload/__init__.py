"""Out-of-core training on one GPU: state and activations in host memory."""
