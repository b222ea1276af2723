"""Configuration of a run: the RunConfig, recipes, overrides, and how a request becomes a complete configuration."""
