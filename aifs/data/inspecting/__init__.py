"""The bytes that each column of an object set should hold, and the columns with wrong ones."""
