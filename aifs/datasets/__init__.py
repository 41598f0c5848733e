"""Datasets as the client and the filesystem both see them: which files belong to one, how each file
is divided into blocks, which rows an epoch's order takes where (docs/guide/datasets.md).

Reads bytes by a ``FileBytes``, never by the filesystem's own means; decodes no rows for users: that
is aifs.client.data.
"""
