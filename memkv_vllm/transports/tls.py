"""TLS beneath a control channel: a :class:`ControlStream` over a socket's stream, with ``ssl`` doing no I/O itself.

TLS 1.3 only, so there is neither compression nor renegotiation; no session tickets. The mutual HMAC handshake runs
inside as ever, and covers the server's certificate (``binding``): somebody in the middle who holds another valid
certificate for the server's name is noticed, since both ends must prove the key over the certificate that they saw.

Nothing waits in here: bytes count as sent once their ciphertext is in the socket, so the writers above see exactly the
back pressure that a plain socket would give. Of what comes in at most one read and one partial record are held.

One port serves both kinds of connection. A server's stream looks at the first byte: a TLS handshake begins with 22,
ours with ``m``. A plain connection is passed through with ``secured`` false, and the driver decides whether it may go
on: data connections may, control connections may not.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memkv_vllm.errors import AuthError, ConfigError, ConnectionLost, LocalProtocolError, RemoteProtocolError
from memkv_vllm.transports.streams import Rest, SocketStream, Take, send_all

__all__ = ["ServerTls", "TlsStream", "client_context"]

_HANDSHAKE_RECORD = 22
_CHUNK_BYTES = 64 * 1024
"""Plaintext that is encrypted ahead of the socket."""
_MAX_UNASKED_BYTES = 64 * 1024
"""Ciphertext that the peer made us produce (answers to key updates) and does not read."""


class ServerTls:
    """The certificate of a server, for all its connections.

    Args:
        cert: PEM file with the certificate and what leads to its issuer.
        key: PEM file with its private key, without a passphrase.

    Raises:
        ConfigError: they cannot be read, or do not belong together.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0
        self._binding = b""
        self.reload()

    def reload(self) -> None:
        """Read the files again, for a renewed certificate; connections that are up keep theirs.

        Raises:
            ConfigError: as above; the old certificate stays in force.
        """
        try:
            # Tried apart first: a context is left with half of a pair that does not fit.
            _context(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key, password=_no_passphrase)
            binding = _binding_of(ssl.PEM_cert_to_DER_cert(_first_certificate(self._cert)))
            self._context.load_cert_chain(self._cert, self._key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            what = f"cannot use {self._cert} with {self._key}: {reason}; expected a PEM certificate chain and its key"
        else:
            self._binding = binding
            return
        raise ConfigError("memkv server settings", [f"network.tls_cert: {what}"])

    def stream(self, inner: SocketStream) -> TlsStream:
        """The stream of a connection that was just accepted. Owns ``inner``."""
        return TlsStream(inner, self._context, server_side=True, binding=self._binding)


def client_context(ca: Path | None) -> ssl.SSLContext:
    """What clients use: certificates signed by ``ca`` (PEM), or by this host's certificate authorities.

    Raises:
        ConfigError: ``ca`` cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(ca)
        return context
    except OSError as error:
        problem = f"cannot use {ca}: {getattr(error, 'reason', None) or error.strerror}; expected PEM certificates"
    raise ConfigError("memkv client settings", [f"tls_ca: {problem}"])


class TlsStream:
    """A control stream over TLS; see the module's text, and :class:`ControlStream` for the methods.

    Args:
        inner: the socket's stream, which it owns.
        context: of :func:`client_context`, or of a :class:`ServerTls`.
        server_side: which side this is.
        server_name: client: the name (or IP address) that the certificate must be for.
        binding: server: digest of the certificate that it shows.
    """

    def __init__(
        self,
        inner: SocketStream,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        server_name: str | None = None,
        binding: bytes = b"",
    ) -> None:
        self._inner = inner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side, server_name)
        self._server_name = server_name
        self._server_binding = binding
        self._unsent = memoryview(b"")
        self._owed = 0
        """Bytes of the caller's that are encrypted and not in the socket yet: not reported as sent either."""
        self.secured = False
        """Whether the channel is encrypted: on a server false for a client that came without TLS."""
        self.binding = b""

    def __repr__(self) -> str:
        return f"<TlsStream {'secured' if self.secured else 'plain'}>"

    async def secure(self) -> None:
        """Perform the TLS handshake; the caller keeps the deadline.

        Raises:
            AuthError: client: the server's certificate is not accepted; says why and what to set.
            ConnectionLost, RemoteProtocolError: the peer left, or does not speak TLS.
        """
        if self._tls.server_side:
            first = await self._inner.receive()
            if first[:1] != bytes([_HANDSHAKE_RECORD]):
                self._inner.unread(first)
                return
            self._incoming.write(first)
        while not self._step():
            await self._flush()
            data = await self._inner.receive()
            if not data:
                hint = "" if self._tls.server_side else ": it is busy, or its network.tls_control is off"
                raise ConnectionLost(f"the peer ended the connection during the TLS handshake{hint}")
            self._incoming.write(data)
        await self._flush()
        self.secured = True
        shown = self._tls.getpeercert(binary_form=True)
        self.binding = _binding_of(shown) if shown else self._server_binding

    async def receive(self) -> bytes:
        """See :class:`ControlStream`."""
        if not self.secured:
            return await self._inner.receive()
        while not (plain := self._decrypt()):
            data = await self._inner.receive()
            if not data:
                return b""
            self._incoming.write(data)
        return plain

    async def feed(self, take: Take) -> None:
        """See :class:`ControlStream`."""
        if not self.secured:
            await self._inner.feed(take)
            return

        def decrypted(data: bytes) -> Rest | None:
            self._incoming.write(data)
            plain = self._decrypt()
            return take(plain) if plain else None

        # The peer may have sent more right behind its handshake.
        left = self._decrypt()
        rest = take(left) if left else None
        if rest is None or await rest():
            await self._inner.feed(decrypted)

    def send_nowait(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> int:
        """See :class:`ControlStream`. What was not taken must be given again, as both writers do."""
        if not self.secured:
            return self._inner.send_nowait(data, fds)
        if fds:
            raise LocalProtocolError("file descriptors do not travel over TLS")
        taken = 0
        while self._push():
            taken, self._owed = taken + self._owed, 0
            chunk = memoryview(data)[taken : taken + _CHUNK_BYTES]
            if not chunk:
                break
            self._owed = self._call(lambda: self._tls.write(chunk))  # noqa: B023 - called at once
        return taken

    async def wait_writable(self) -> None:
        """See :class:`ControlStream`."""
        await self._inner.wait_writable()

    def accept_fds(self) -> None:
        """See :class:`ControlStream`. None come over TLS."""

    def take_fd(self) -> int | None:
        """See :class:`ControlStream`. None come over TLS."""
        return None

    def end(self) -> None:
        """See :class:`ControlStream`."""
        self._inner.end()

    def close(self) -> None:
        """See :class:`ControlStream`. No closing alert is sent: BYE says what TLS would."""
        self._inner.close()

    def release(self) -> socket.socket:
        """The socket of a connection that came without TLS; see :meth:`SocketStream.release`."""
        if self.secured:
            raise LocalProtocolError("the socket under TLS cannot be used without it")
        return self._inner.release()

    # -- inside

    def _step(self) -> bool:
        """One step of the handshake; whether it is done."""
        try:
            self._tls.do_handshake()
            return True
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLCertVerificationError as error:
            raise self._not_accepted(error) from None
        except ssl.SSLError as error:
            self._alert()
            if not self._tls.server_side and error.reason in ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL"):
                text = "the server does not speak TLS: its network.tls_control is off, or unset tls here"
                raise RemoteProtocolError("tls", text) from None
            raise RemoteProtocolError("tls", f"the TLS handshake failed: {_reason(error)}") from None

    def _alert(self) -> None:
        """Tell the peer why, as far as the socket takes it."""
        with suppress(ConnectionLost):
            self._push()

    def _not_accepted(self, error: ssl.SSLCertVerificationError) -> AuthError:
        self._alert()
        fix = "set tls_ca to the certificate of the authority that signed it"
        if "ostname mismatch" in error.verify_message or "IP address mismatch" in error.verify_message:
            fix = "set tls_server_name to a name that it is for, or issue one for this name"
        elif "expired" in error.verify_message or "not yet valid" in error.verify_message:
            fix = "renew it on the server, or set this host's clock"
        return AuthError(f"TLS: the server's certificate is not accepted: {error.verify_message}; {fix}")

    def _decrypt(self) -> bytes:
        """All plaintext that is there."""
        parts = []
        while True:
            try:
                part = self._tls.read(_CHUNK_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                break  # the peer's closing alert: the end of the stream follows
            except ssl.SSLError as error:
                raise RemoteProtocolError("tls", f"TLS failed: {_reason(error)}") from None
            if not part:
                break
            parts.append(part)
        if self._outgoing.pending > _MAX_UNASKED_BYTES:
            raise RemoteProtocolError("tls", "the peer asks for TLS answers and does not read them")
        return b"".join(parts)

    def _push(self) -> bool:
        """Give the socket ciphertext as far as it takes it; whether all is gone."""
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            taken = self._inner.send_nowait(self._unsent)
            self._unsent = self._unsent[taken:]
            if not taken:
                return False
        return True

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await send_all(self._inner, self._outgoing.read())

    def _call(self, write: Callable[[], int]) -> int:
        try:
            return write()
        except ssl.SSLError as error:
            raise ConnectionLost(f"TLS failed: {_reason(error)}") from None


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    return context


def _no_passphrase(*_: Any) -> str:
    # Without this OpenSSL would ask on the terminal and hold up the server's start for ever.
    raise ValueError("the private key is protected by a passphrase")


def _first_certificate(path: Path) -> str:
    end = "-----END CERTIFICATE-----"
    text = path.read_text(encoding="ascii")
    return text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)] + "\n"


def _binding_of(certificate: bytes) -> bytes:
    return hashlib.sha256(b"memkv tls certificate\0" + certificate).digest()


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's word for it, such as ``TLSV1_ALERT_UNKNOWN_CA``; nothing of the peer's text."""
    return str(error.reason or "protocol error").replace("_", " ").lower()
