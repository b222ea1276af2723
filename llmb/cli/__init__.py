"""Command lines llmb-run and llmb-install, one file per subcommand."""
