"""Grouped I/O: what the ranks of a group write together is planned as one. Pure: no I/O, no tasks.

``planner`` makes the plan of a pattern, ``network`` finds flows for it.
"""
