"""Search of layouts and serving settings for the least predicted time that fits in memory."""
