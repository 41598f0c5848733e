"""Who carries out work on bytes: processes that are started for it, or the daemon itself.

Imports burst, meta, data, layout and core.
"""
