"""Virtual files: below ``DIR/.aifs-data``, found by name, never listed (docs/guide/datasets.md)."""
