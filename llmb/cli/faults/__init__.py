"""Options of submit that inject faults into a run."""
