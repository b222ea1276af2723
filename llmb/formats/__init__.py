"""Formats of files and facts of folders and devices, read without torch: safetensors, token files, GPUs."""
