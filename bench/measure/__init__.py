"""What programs that measure share: options, device, timer, tables, processes of peers."""
