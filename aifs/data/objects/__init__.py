"""Striped files: one object set each, plain or protected by replicas or an erasure code."""
