"""The store: what a server holds and how it serves it.

Pure: ``arena``, ``entries``, ``table``, ``eviction``, ``manifests``, ``bulkqueue``. Drivers: ``turns``,
``sessions``, ``transfers``, ``requests``, ``handler``, ``server``.
"""
