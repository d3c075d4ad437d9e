"""The entries of the error catalog, one file a class of codes; `catalog.py` gathers them. To add a code, add one `Entry` to the tuple of its file."""
