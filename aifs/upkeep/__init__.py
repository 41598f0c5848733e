"""Background work of a store: making room, deleting, compacting, scrubbing, rebuilding, moving."""
