"""Samples of many requests: their times as columns, percentiles by selection."""
