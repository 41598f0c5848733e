"""Whether bytes have their checksums, and which columns may be at fault."""
