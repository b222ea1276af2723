"""Sweeps over loads: figures of their points, SLO limits, Pareto sets."""
