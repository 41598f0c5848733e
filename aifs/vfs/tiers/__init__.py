"""Between the tiers: drain, stage, evict; containers and their compaction."""
