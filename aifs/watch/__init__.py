"""What a mount shows of itself over HTTP: metrics, a health probe, a page. Made of what ``aifs
status`` and ``aifs trace`` are told, and of nothing else.
"""
