"""Goodput of a run that was restarted, and what each fault cost it."""
