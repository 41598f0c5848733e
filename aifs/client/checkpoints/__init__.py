"""Checkpoints as directories, and what all parts of the client use: attributes of a mount, locks,
digests, files of tensors."""
