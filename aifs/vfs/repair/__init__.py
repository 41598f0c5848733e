"""What keeps stored bytes right: rebuild, moves of columns, scrub."""
