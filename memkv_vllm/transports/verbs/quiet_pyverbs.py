"""Importing pyverbs without its side effect: import this module before anything of pyverbs.

``pyverbs.base`` calls ``logging.basicConfig`` as it is imported, so that a library would decide how the application
logs. That call does nothing while the root logger has a handler: it is lent one for this one import, which takes a
millisecond.
"""

from __future__ import annotations

import logging

__all__: list[str] = []


def _import_base() -> None:
    lent = logging.NullHandler()
    logging.root.addHandler(lent)
    try:
        import pyverbs.base  # noqa: F401
    finally:
        logging.root.removeHandler(lent)


_import_base()
