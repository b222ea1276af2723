"""The serving engine: continuous batching over a paged cache, and the benchmark that drives it in its own process."""
