"""The store as a whole: directories and their owner, servers, identifiers, backups."""
