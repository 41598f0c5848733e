"""Interleaved files: chunks of many in a few large containers."""
