"""The burst tier: local directories that take new bytes first, and the moving of bytes to the data
servers.

Imports meta, data, layout and core.
"""
