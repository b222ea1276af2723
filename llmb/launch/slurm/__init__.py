"""Slurm: cluster configuration, job scripts, submission and job states."""
