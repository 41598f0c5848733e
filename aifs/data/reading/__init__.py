"""Shared by reads of all layouts: buffers, streams of readers, and the read cache."""
