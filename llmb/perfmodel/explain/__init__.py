"""Expected figures of a run, and whether measured ones are possible."""
