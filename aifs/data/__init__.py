"""Data servers and the objects on them: the bulk bytes of files. Knows no names and no inodes. Imports layout and core."""
