"""What is done in the background for a store: making room, deleting, compacting, scrubbing,
rebuilding."""
