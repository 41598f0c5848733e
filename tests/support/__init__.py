"""What several test layers share: oracles, state machines, mounts, power cuts."""
