"""Reading that is known ahead: the epochs and the starts of jobs, and virtual files."""
