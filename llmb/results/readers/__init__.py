"""Readers of logs that other engines write."""
