"""Goodput that a run with faults can expect, and the best interval between its checkpoints.

    best_interval_s(checkpoint_s=2.0, between_faults_s=3600.0) -> 120.0

Young 1974, Daly 2006: a checkpoint that costs C after every interval t, and half an interval lost with each fault, one
every M of training: the sum C / t + t / (2 M) is least at t = sqrt(2 C M). Left out: faults during a checkpoint (which
lose a whole interval) or a restart, and steps that run slower while a checkpoint is still being written.
"""

import math


def best_interval_s(checkpoint_s: float, between_faults_s: float) -> float:
    """Return the work between two checkpoints that costs least: sqrt(2 * checkpoint cost * time between faults)."""
    return math.sqrt(2 * checkpoint_s * between_faults_s)


def expected_fraction(interval_s: float, checkpoint_s: float, between_faults_s: float, outage_s: float) -> float:
    """Return the fraction of time in which a run advances; 0 where faults come before a checkpoint does.

    `outage_s`: from a fault until steps run again: time to detect it and to restart.
    """
    kept_s = max(0.0, between_faults_s - interval_s / 2)  # of the work between two faults
    return kept_s / (between_faults_s + outage_s) / (1 + checkpoint_s / interval_s)
