"""Durations as people and Slurm write them."""


def format_duration(seconds: float | None) -> str | None:
    """Format whole seconds as h:mm:ss: 0:00:07, 1:02:03 or 2-03:04:05."""
    if seconds is None:
        return None
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{minutes:02}:{whole_seconds:02}"
    return f"{days}-{hours:02}:{clock}" if days else f"{hours}:{clock}"
