"""Checkpoints as directories, and below them what all parts of the client use: attributes of a
mount, locks, digests of files and trees, files of tensors."""
