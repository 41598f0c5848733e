"""What reads of all layouts share: buffers, streams of readers, and the read cache."""
