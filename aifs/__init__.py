"""AIFS: a parallel filesystem for AI training, served through FUSE."""

__version__ = "0.1.0"

COMMIT = ""
"""The commit that a package was built from, as scripts/package writes it; else empty."""
