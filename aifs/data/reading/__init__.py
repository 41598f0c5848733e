"""What reads of all layouts share: buffers, streams of readers, the read cache, whole chunks in
memory.
"""
