"""Results for people: tables, live progress, comparisons."""
