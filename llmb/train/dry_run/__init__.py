"""Dry run of one rank on the meta device: its memory, FLOPs and collectives at full size."""
