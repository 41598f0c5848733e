"""Trees of files to buckets of object stores, and from them."""
