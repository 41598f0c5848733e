"""Open files: their bytes, wherever these lie, handles, durability."""
