"""The store as a whole: its directories and who owns them, its servers, its identifiers, and
backups of its metadata."""
