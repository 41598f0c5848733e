"""Data servers and the objects on them: the bulk bytes of files. Knows no names and no inodes.
Imports layout and core.

What one server is asked, how it does and what lies where below it is here; above that there are
rooms: ``objects`` (striped files), ``containers`` (interleaved files), ``reading`` (what both have
in common), ``checking``.
"""
