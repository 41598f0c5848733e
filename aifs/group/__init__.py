"""Grouped I/O: what the ranks of a group write together is planned as one. Pure: no I/O, no tasks.

``pattern`` is the problem, ``plan`` an answer, ``planner`` finds one (``network``: flows;
``whole``: whole chunks), ``lp`` is the reference, ``cache`` keeps plans from step to step.
"""
