"""llmb-run compare: what differs between runs, their figures and ratios, verdicts and what speaks against them."""
