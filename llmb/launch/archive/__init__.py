"""Archives of run folders: pack, unpack, scrub secrets, import."""
