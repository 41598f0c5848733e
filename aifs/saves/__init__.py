"""How checkpoints appear, and go, at one stroke: barrier, publishing, groups, retention."""
