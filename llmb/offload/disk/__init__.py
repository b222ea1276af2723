"""Disk tier of out-of-core training: its file, staging buffers and rates."""
