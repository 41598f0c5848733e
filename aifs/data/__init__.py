"""Data servers and the objects on them: the bulk bytes of files, without names and inodes.

One server (requests, health, places) is here; above it are ``objects`` (striped files),
``containers`` (interleaved files), ``reading`` (common to both), ``inspecting``.
"""
