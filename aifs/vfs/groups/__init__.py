"""Grouped writes: which files belong to which group, when it is complete, and how it is drained as
one. docs/guide/grouped.md.
"""
