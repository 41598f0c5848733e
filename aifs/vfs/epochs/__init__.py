"""Epochs of datasets that are read here: the files that they need next are in the burst tier before
their readers come to them (docs/guide/datasets.md, Reading ahead)."""
