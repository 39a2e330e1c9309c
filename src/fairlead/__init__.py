"""Fairlead: a language-model server that gives every user a fair turn."""

import sys

OLDEST_PYTHON = (3, 11)

# pip checks this too, but a source tree on PYTHONPATH or a copied environment gets here without it. The rest
# of the package would fail with a syntax or import error that names no version.
if sys.version_info < OLDEST_PYTHON:
    raise ImportError(
        "Fairlead needs Python {}.{} or later; this is Python {}.{}.{} ({})".format(
            *OLDEST_PYTHON, *sys.version_info[:3], sys.executable
        )
    )
