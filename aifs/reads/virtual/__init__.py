"""Virtual files: below ``DIR/.aifs-data``, found by name and never listed
(docs/guide/datasets.md)."""
