"""Which releases of vLLM are tested; apart from ``compat``, which cannot be imported without vLLM."""

from __future__ import annotations

__all__ = ["SUPPORTED"]

SUPPORTED = "0.25 to 0.33"
"""For messages. Features decide, never this."""
