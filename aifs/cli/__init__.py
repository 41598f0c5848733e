"""The command line: one command per file. Alone prints and exits; may use everything below it."""
