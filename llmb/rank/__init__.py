"""One process of an engine, whatever it computes: how it starts, records, labels its output, hears signals and ends."""
