"""Regular files: where their bytes are, how they are read and changed, and how they move between
the tiers."""
