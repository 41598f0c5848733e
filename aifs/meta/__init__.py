"""The namespace as records in an ordered transactional key-value store; no file bytes."""
