"""Load generator: sends requests to an OpenAI-compatible server at scheduled times and records what comes back."""
