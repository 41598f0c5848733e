"""Starts of jobs: what one touches is recorded, and is there when the next one needs it
(docs/guide/startup.md; BootSeer, sec. 4.1)."""
