"""Timelines of profiled out-of-core runs: SVG pictures, captions, Chrome trace."""
