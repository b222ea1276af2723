"""`llmb-run report`, and the pages that runs and sweeps write by themselves."""
