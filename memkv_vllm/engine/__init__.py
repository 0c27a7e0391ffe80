"""The transfer engine of one rank, and the parts of it that the scheduler side shares.

``api`` holds what a caller sees; ``engine`` the event loop's owner; the other modules are its parts.
"""
