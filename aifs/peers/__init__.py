"""What hosts of one store say to one another: it makes things fast, and nothing depends on it."""
