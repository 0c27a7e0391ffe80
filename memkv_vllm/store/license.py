"""Verifies the licenses that clients present, where the server's operator asks for them.

A license is a JWT (RFC 7519) that the operator signs; the server has the public key only. The algorithm follows from
the type of that key and is never taken from the token, so a token cannot choose a weaker one (``none``, or an HMAC
keyed with the public key). Time is an argument.
"""

from __future__ import annotations

import math
import time
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from memkv_vllm.config import LicenseConfig
from memkv_vllm.errors import ConfigError, LicenseError

__all__ = ["LicenseVerifier"]

_MIN_RSA_BITS = 2048
_SETTING = "license.public_key_file"

_REASONS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.InvalidSignatureError, "its signature is not of the key in this server's license.public_key_file"),
    (jwt.InvalidAlgorithmError, "it is not signed with {algorithm}, as this server's key is"),
    (jwt.InvalidIssuerError, "its issuer (iss) is not this server's license.issuer"),
    (jwt.InvalidAudienceError, "its audience (aud) is not this server's license.audience"),
    (jwt.MissingRequiredClaimError, "it lacks a claim that this server asks for (license.issuer, license.audience)"),
    (jwt.PyJWTError, "it is not a license token: a JWT, three parts joined by dots"),
)
"""What to tell whoever presented a license; the first that fits. Nothing of the token stands in any of them."""

_PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class LicenseVerifier:
    """Judges licenses by one public key.

    Args:
        config: with ``public_key_file`` set.

    Raises:
        ConfigError: the file cannot be read, or holds no public key of a kind that is known here.
    """

    def __init__(self, config: LicenseConfig) -> None:
        self._issuer, self._audience, self._leeway_s = config.issuer, config.audience, config.leeway_s
        self._key, self.algorithm = _load(config)

    def __repr__(self) -> str:
        return f"<LicenseVerifier {self.algorithm}>"

    def verify(self, token: str, now_s: float) -> float:
        """Check a license.

        Args:
            token: what the client presented.
            now_s: seconds since the epoch.

        Returns:
            When it ends, in seconds since the epoch, the leeway included; infinity if it has no ``exp``.

        Raises:
            LicenseError: it is not valid now; says why.
        """
        claims = self._claims(token)
        begins_s, ends_s = _time_of(claims, "nbf", -math.inf), _time_of(claims, "exp", math.inf)
        if now_s + self._leeway_s < begins_s:
            raise LicenseError(
                f"the license is not valid before {_shown(begins_s)}; here it is {_shown(now_s)}: "
                f"wait, or set this host's clock"
            )
        if now_s - self._leeway_s >= ends_s:
            raise LicenseError(f"the license has expired on {_shown(ends_s)}; here it is {_shown(now_s)}: renew it")
        return ends_s + self._leeway_s

    def _claims(self, token: str) -> dict[str, Any]:
        required = [name for name, value in (("iss", self._issuer), ("aud", self._audience)) if value is not None]
        # exp and nbf are compared above, on the caller's clock.
        options: Any = dict.fromkeys(("verify_exp", "verify_nbf", "verify_iat"), False)
        options |= {"require": required, "verify_aud": self._audience is not None}
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key,
                algorithms=[self.algorithm],
                issuer=self._issuer,
                audience=self._audience,
                options=options,
            )
            return claims
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            reason = next((text for kind, text in _REASONS if isinstance(error, kind)), _REASONS[-1][1])
        # Raised outside of the except block: PyJWT's error, which may quote the token, is not chained.
        raise LicenseError(f"the license is not valid: {reason.format(algorithm=self.algorithm)}")


def _load(config: LicenseConfig) -> tuple[_PublicKey, str]:
    path = config.public_key_file
    try:
        if path is None:
            raise ValueError("not set")
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror}; check its owner and mode"
    except (ValueError, UnsupportedAlgorithm):
        problem = f"{path} holds no PEM public key (BEGIN PUBLIC KEY); name the public half, never the private key"
    else:
        if isinstance(key, RSAPublicKey) and key.key_size >= _MIN_RSA_BITS:
            return key, "RS256"
        if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
            return key, "ES256"
        if isinstance(key, Ed25519PublicKey):
            return key, "EdDSA"
        problem = f"{path} holds a key of another kind; use RSA of at least {_MIN_RSA_BITS} bits, P-256 or Ed25519"
    raise ConfigError("memkv server settings", [f"{_SETTING}: {problem}"])


def _time_of(claims: dict[str, Any], name: str, default: float) -> float:
    value = claims.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise LicenseError(f"the license is not valid: its {name} is not a number of seconds")
    if abs(value) < 1e15:
        return float(value)
    return math.inf if value > 0 else -math.inf


def _shown(moment_s: float) -> str:
    """A moment for a message, in UTC."""
    if not 0 <= moment_s < 253_402_300_800:  # year 10000
        return f"{moment_s:g} s"
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(moment_s))
