"""Virtual files: below ``DIR/.aifs``, found by name and never listed (docs/datasets.md)."""
