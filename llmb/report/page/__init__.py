"""The report page: one self-contained HTML file of a run, a sweep, several runs, or all runs."""
