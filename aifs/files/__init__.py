"""Regular files: where their bytes are, how they are read and changed, how they move between
tiers."""
