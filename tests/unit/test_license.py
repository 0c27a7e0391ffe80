"""Licenses: which are accepted, and what whoever presents another one is told."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa, x25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.config import LicenseConfig, ServerConfig, load_server_config
from memkv_vllm.errors import ConfigError, LicenseError
from memkv_vllm.store.license import LicenseVerifier
from tests.support.licenses import KINDS, Issuer

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def issuers() -> dict[str, Issuer]:
    return {name: Issuer(name) for name in KINDS}


def verifier(folder: Path, signer: Issuer, **settings: Any) -> LicenseVerifier:
    return LicenseVerifier(LicenseConfig(public_key_file=signer.write(folder), **settings))


def token(issuer: Issuer, **claims: Any) -> str:
    return jwt.encode(claims, issuer.private, issuer.algorithm)


@pytest.mark.parametrize("algorithm", KINDS)
def test_the_kind_of_key_says_the_algorithm(tmp_path: Path, issuers: dict[str, Issuer], algorithm: str) -> None:
    judge = verifier(tmp_path, issuers[algorithm])
    assert judge.algorithm == algorithm
    assert judge.verify(token(issuers[algorithm], exp=NOW + 100), NOW) == NOW + 160
    assert judge.verify(token(issuers[algorithm]), NOW) == math.inf
    for other in KINDS:
        if other != algorithm:
            with pytest.raises(LicenseError, match=algorithm):
                judge.verify(token(issuers[other], exp=NOW + 100), NOW)


@pytest.mark.parametrize("algorithm", KINDS)
def test_another_signature_is_refused(tmp_path: Path, issuers: dict[str, Issuer], algorithm: str) -> None:
    judge = verifier(tmp_path, issuers[algorithm])
    with pytest.raises(LicenseError, match=r"signature is not of the key in this server's license\.public_key_file"):
        judge.verify(token(Issuer(algorithm), exp=NOW + 100), NOW)
    head, _, signature = token(issuers[algorithm], exp=NOW + 100).split(".")
    claims = base64.urlsafe_b64encode(json.dumps({"exp": NOW * 2}).encode()).rstrip(b"=").decode()
    with pytest.raises(LicenseError, match="signature"):
        judge.verify(f"{head}.{claims}.{signature}", NOW)


def test_a_token_cannot_choose_its_algorithm(tmp_path: Path, issuers: dict[str, Issuer]) -> None:
    """The classic holes: no signature at all, and an HMAC whose key is the public key that everybody has."""
    issuer = issuers["RS256"]
    judge = verifier(tmp_path, issuer)
    head = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    claims = base64.urlsafe_b64encode(b"{}").rstrip(b"=").decode()
    for forged in (f"{head}.{claims}.", _hmac_token(issuer.public_pem)):
        with pytest.raises(LicenseError, match="not signed with RS256"):
            judge.verify(forged, NOW)


def _hmac_token(secret: bytes) -> str:
    parts = [base64.urlsafe_b64encode(part).rstrip(b"=") for part in (b'{"alg":"HS256","typ":"JWT"}', b"{}")]
    signature = hmac.digest(secret, b".".join(parts), hashlib.sha256)
    return b".".join([*parts, base64.urlsafe_b64encode(signature).rstrip(b"=")]).decode()


def test_dates_are_compared_with_a_small_leeway(tmp_path: Path, issuers: dict[str, Issuer]) -> None:
    issuer = issuers["EdDSA"]
    judge = verifier(tmp_path, issuer, leeway_s=10)
    license = token(issuer, nbf=NOW, exp=NOW + 100)
    for now in (NOW - 10, NOW, NOW + 109):
        assert judge.verify(license, now) == NOW + 110
    with pytest.raises(LicenseError, match=r"expired on 2027-01-15 08:01:40Z; here it is 2027-01-15 08:01:50Z"):
        judge.verify(license, NOW + 110)
    with pytest.raises(LicenseError, match="not valid before 2027-01-15"):
        judge.verify(license, NOW - 11)


@pytest.mark.parametrize("value", ["soon", True, [], {}, "1e99"])
@pytest.mark.parametrize("name", ["exp", "nbf"])
def test_dates_that_are_no_numbers(tmp_path: Path, issuers: dict[str, Issuer], name: str, value: object) -> None:
    judge = verifier(tmp_path, issuers["EdDSA"])
    with pytest.raises(LicenseError, match="not valid"):
        judge.verify(_signed(issuers["EdDSA"], {name: value}), NOW)


@pytest.mark.parametrize("value", [1e308, 10**300, -(10**300), -1])
def test_dates_beyond_all_time(tmp_path: Path, issuers: dict[str, Issuer], value: float) -> None:
    judge, license = verifier(tmp_path, issuers["EdDSA"]), _signed(issuers["EdDSA"], {"exp": value})
    if value > 0:
        assert judge.verify(license, NOW) > NOW
    else:
        with pytest.raises(LicenseError, match="expired"):
            judge.verify(license, NOW)


def _signed(issuer: Issuer, claims: dict[str, Any]) -> str:
    """A rightly signed token whose claims PyJWT would not make."""
    return jwt.api_jws.encode(json.dumps(claims).encode(), issuer.private, issuer.algorithm)


def test_issuer_and_audience_where_they_are_set(tmp_path: Path, issuers: dict[str, Issuer]) -> None:
    issuer = issuers["EdDSA"]
    judge = verifier(tmp_path, issuer, issuer="acme", audience="memkv")
    assert judge.verify(token(issuer, iss="acme", aud=["memkv", "other"]), NOW) == math.inf
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"iss": "x", "aud": "memkv"}, "license.issuer"),
        ({"iss": "acme", "aud": "x"}, "license.audience"),
        ({"iss": "acme"}, "lacks a claim"),
        ({"aud": "memkv"}, "lacks a claim"),
    ]
    for claims, reason in wrong:
        with pytest.raises(LicenseError, match=reason):
            judge.verify(token(issuer, **claims), NOW)
    anything = verifier(tmp_path, issuer)
    assert anything.verify(token(issuer, iss="x", aud="y"), NOW) == math.inf


@given(st.text(max_size=200) | st.from_regex(r"\AeyJ[\w-]{0,40}\.[\w-]{0,40}\.[\w-]{0,40}\Z"))
def test_what_is_no_token_is_refused_and_not_repeated(text: str) -> None:
    judge = LicenseVerifier.__new__(LicenseVerifier)
    judge._issuer = judge._audience = None
    judge._leeway_s, judge.algorithm, judge._key = 60.0, "EdDSA", _KEY.private.public_key()
    with pytest.raises(LicenseError) as caught:
        judge.verify(text, NOW)
    assert len(text) < 8 or text not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__context__ is None


_KEY = Issuer("EdDSA")


# ------------------------------------------------------------------------------------------------ the public key


def test_keys_that_cannot_be_used_are_named(tmp_path: Path, issuers: dict[str, Issuer]) -> None:
    spki = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    files = {
        "rsa1024": rsa.generate_private_key(65537, 1024).public_key().public_bytes(*spki),
        "p384": ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes(*spki),
        "x25519": x25519.X25519PrivateKey.generate().public_key().public_bytes(*spki),
        "private": issuers["EdDSA"].private_pem,
        "text": b"no key at all",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"license\.public_key_file: .*" + name) as caught:
            LicenseVerifier(LicenseConfig(public_key_file=path))
        assert "PRIVATE" not in str(caught.value) or "never the private key" in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        LicenseVerifier(LicenseConfig(public_key_file=tmp_path / "nowhere"))


def test_a_server_that_cannot_read_its_public_key_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "memkv.yaml"
    key = "ab" * 32
    path.write_text(
        f"network: {{auth_key: '{key}'}}\nmemory: {{max_size: 8MiB}}\nlicense: {{public_key_file: no.pem}}\n"
    )
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"license\.public_key_file: no such file"):
        load_server_config(path)


def test_an_issuer_without_a_key_is_a_wrong_setting() -> None:
    network = {"auth_key": "ab" * 32}
    with pytest.raises(ValueError, match=r"license\.public_key_file"):
        ServerConfig.model_validate({"network": network, "memory": {"max_size": "8MiB"}, "license": {"issuer": "acme"}})
