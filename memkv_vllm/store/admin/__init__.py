"""The server's admin HTTP: health, status, metrics, a page for people, and the commands that change something.

``server`` owns the rest; ``listener`` is the bounded HTTP endpoint, ``routes`` what each path answers, ``peers`` asks
the other servers for the table of the page. ``health``, ``families``, ``watch``, ``servers``, ``access`` and
``commands`` are pure: facts in, answers out. A server command is added in ``commands``.
"""
