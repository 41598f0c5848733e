"""The burst tier: local directories that take new bytes first, and moving bytes to the data
servers."""
