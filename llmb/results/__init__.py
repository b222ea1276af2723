"""Events and configuration to a Result; the job store."""
