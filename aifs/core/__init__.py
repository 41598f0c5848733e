"""Ground floor: errors, units, configuration, log, fault points, persistent files."""
