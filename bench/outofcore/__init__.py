"""Parts of outofcore_gpu.py: rows, plans, runs and peers of training from host memory."""
