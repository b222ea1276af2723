"""llmb-run jobs and its subcommands."""
