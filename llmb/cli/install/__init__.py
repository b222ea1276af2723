"""llmb-install and its subcommands."""
