"""Who carries out work on bytes: the daemon itself.

Imports burst, meta, data, layout and core.
"""
