"""A mount over HTTP: metrics, a health probe, a page. Made from the answers to ``aifs status`` and
``aifs trace``, and from nothing else.
"""
