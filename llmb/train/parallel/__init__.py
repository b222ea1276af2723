"""Parallelism over ranks: the device mesh and each technique."""
