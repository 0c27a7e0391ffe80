"""The wire protocol, sans-I/O: messages and their layouts, the codec, the handshake, the session.

Nothing here knows a socket, a thread, a clock or an event loop.
"""
