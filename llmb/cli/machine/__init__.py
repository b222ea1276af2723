"""Commands about machines: doctor."""
