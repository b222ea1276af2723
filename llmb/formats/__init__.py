"""File formats of other projects, read without torch: safetensors, token files, checksums, weight folders."""
