"""Parts of train_gpu.py: rows, ceilings, lower bounds, traces and peers of training."""
