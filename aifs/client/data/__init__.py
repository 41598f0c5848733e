"""Datasets for training: rows of any format in an order that is computed, shuffled at the speed of
sequential reading, resumable to the row (docs/datasets.md).

Works on a mount of AIFS and in any other directory. Needs the extra ``data``.
"""
