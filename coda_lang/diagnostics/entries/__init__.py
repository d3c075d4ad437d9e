"""The entries of the error catalog, one file a class of codes; `catalog.py` gathers them. A new code is a new `Entry` there."""
