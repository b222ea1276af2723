"""Limits of the native engine: its refusals, its departures from a recipe row, and its number formats.

The desk asks before anything is submitted, and each rank asks again when it starts: the same functions.
"""
