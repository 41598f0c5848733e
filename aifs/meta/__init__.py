"""The namespace as records in an ordered transactional key-value store. Knows nothing of file
bytes. Imports core and layout.
"""
