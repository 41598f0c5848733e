"""How checkpoints become visible, and go, at one stroke: the barrier, publishing, pending
directories, groups of ranks, retention.
"""
