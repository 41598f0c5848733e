"""Whether bytes are right, whose fault it is if not, and what they should be."""
