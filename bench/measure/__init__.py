"""Common parts of the programs that measure: options, device, timer, tables, processes of peers."""
