"""Training on one GPU of a Llama that it cannot hold: the device side of a plan made by `llmb/predict`."""
