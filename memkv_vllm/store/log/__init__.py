"""Disk behind the arena: log-structured segments on files or block devices. The store sees :mod:`.api` alone."""
