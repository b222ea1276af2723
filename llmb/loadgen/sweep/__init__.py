"""Sweeps over loads: ladders, searches, plans, folders."""
