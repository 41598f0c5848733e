"""``aifs fsck --rebuild-from-servers``: a store whose metadata is lost, told by its servers."""
