"""The pyfuse3 adapter: turns kernel requests into calls of vfs and its answers into replies. Nothing else does."""
