"""`python -m coda_lang` is `codac`."""

from .cli import run

run()
