"""Who may change something over admin HTTP: whoever presents the token, in a header and in no other way. Pure.

A browser sends no such header by itself, so a page of somebody else cannot act for an operator who visits it: there
is no cookie and no login that it could ride on.
"""

from __future__ import annotations

import hmac
from enum import Enum

__all__ = ["Verdict", "judge"]


class Verdict(Enum):
    """Whether a request may change something."""

    ALLOWED = "allowed"
    NO_TOKEN_CONFIGURED = "no_token_configured"
    """The server has no token, so nobody may."""
    MISSING = "missing"
    WRONG = "wrong"


def judge(authorization: str | None, token: str | None) -> Verdict:
    """What an ``Authorization`` header is worth.

    Args:
        authorization: the header as it was sent, None without one.
        token: what the server's settings have.
    """
    if token is None:
        return Verdict.NO_TOKEN_CONFIGURED
    scheme, _, presented = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer" or not presented.strip():
        return Verdict.MISSING
    # In constant time, so that no part of the token can be found by timing many guesses.
    same = hmac.compare_digest(presented.strip().encode("utf-8", "surrogateescape"), token.encode())
    return Verdict.ALLOWED if same else Verdict.WRONG
