"""Commands about machines: doctor and probe."""
