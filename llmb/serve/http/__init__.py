"""OpenAI-compatible HTTP server over the serving engine: `llmb-run serve`, `python -m llmb.serve.http config.json`."""
