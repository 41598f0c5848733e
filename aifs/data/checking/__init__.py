"""What checksums say of bytes, and which columns may be at fault."""
