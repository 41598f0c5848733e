"""AIFS: a parallel filesystem for AI training, served through FUSE."""

__version__ = "0.1.0"
