"""Transports: how control frames and bulk bytes travel between a client and a server.

``base`` is the seam that the engine and the store see, ``registry`` finds an implementation by name,
``control`` drives the sans-I/O session over a byte stream for all of them, ``memory`` makes the shared
mappings that they register.
"""
