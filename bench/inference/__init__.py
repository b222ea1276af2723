"""Parts of infer_gpu.py, models_gpu.py and the serve programs: ceilings, kernels, whole runs, other clients."""
