"""Datasets for client and filesystem: files, their blocks, and rows of an epoch's order
(docs/guide/datasets.md). Reads by a ``FileBytes``; decodes no rows for users (aifs.client.data)."""
