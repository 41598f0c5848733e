"""What every column of an object set should hold: whose bytes are wrong, and the right ones."""
