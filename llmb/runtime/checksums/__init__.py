"""Checksums of the files of a checkpoint."""
