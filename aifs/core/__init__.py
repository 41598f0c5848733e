"""Ground floor: errors, units, configuration, log, fault points, persistent files. Imports nothing
of AIFS.
"""
