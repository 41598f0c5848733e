"""Checking a store that nobody uses: fsck. Imports vfs and everything below it."""
