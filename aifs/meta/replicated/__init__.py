"""The metadata of a cluster: each host has a replica of the map, whose truth is in PostgreSQL."""
