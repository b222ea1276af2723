"""llmb: how fast a large language model trains or serves on this hardware, whether that is good, and why."""

__version__ = "0.1.0"
