"""What `llmb-run doctor` looks at: facts of a machine, what is wrong with them, and nodes that differ."""
