"""What becomes visible, and what goes, at one stroke: barrier, publish, pending directories,
retention.
"""
