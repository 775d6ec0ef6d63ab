"""The handshake: Hello -> [Challenge -> Proof] -> Welcome or Refused. No I/O.

Where the server has a token, both ends prove that they have it, and neither says it:

    Proof.mac   = HMAC-SHA256(token, "everstep link client 1" 0x00 | server's nonce | client's nonce | meta of Hello)
    Welcome.mac = HMAC-SHA256(token, "everstep link server 1" 0x00 | server's nonce | client's nonce | meta of Hello)

Both nonces are new in each connection, so nothing can be replayed; the labels differ, so nothing can be reflected. The
meta of Hello is the bytes that were sent, with fields of a newer version that this one does not know.

This proves who is there when the connection is made. What is said afterwards is protected by TLS, or by nothing.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets

from everstep.errors import LinkError, LinkRefused, UsageError
from everstep.link import messages
from everstep.link.messages import NONCE_BYTES, VERSION, Challenge, Hello, Message, Proof, Refused, Welcome

_CLIENT = b"everstep link client 1\0"
_SERVER = b"everstep link server 1\0"


class Turn(enum.Enum):
    """What a handshake waits for."""

    HELLO = "Hello"
    ANSWER = "Challenge, Welcome or Refused"
    PROOF = "Proof"
    VERDICT = "Welcome or Refused"
    """From the other end (client), or from the program around it (server)."""
    DONE = "nothing: it is over"
    FAILED = "nothing: it failed"


class ClientHandshake:
    """The end that connects. A client with a token goes on only with a server that proves the same token."""

    def __init__(self, hello: Hello, token: bytes | None = None) -> None:
        self.hello = hello
        self._token = _checked(token)
        self._turn = Turn.HELLO
        self._expected = b""
        self.welcome: Welcome | None = None
        """Set when the handshake is over and the server is the one it says."""

    @property
    def turn(self) -> Turn:
        return self._turn

    def start(self) -> Hello:
        """What to send first."""
        if self._turn is not Turn.HELLO:
            raise UsageError("a handshake serves one connection: make a new one")
        self._turn = Turn.ANSWER
        return self.hello

    def receive(self, message: Message) -> Proof | None:
        """Take in what the server says; what to send next, if anything. LinkRefused if it refuses."""
        turn, self._turn = self._turn, Turn.FAILED
        if turn in (Turn.ANSWER, Turn.VERDICT) and isinstance(message, Refused):
            raise LinkRefused(f"the shadow refused this connection: {message.reason}")
        if turn is Turn.ANSWER and isinstance(message, Challenge):
            return self._prove(message)
        if turn is Turn.ANSWER and isinstance(message, Welcome):
            if self._token is not None:
                raise LinkError(
                    "the shadow did not ask for the token, so it cannot be told from an impostor: start it with the token, "
                    "or connect without one"
                )
        elif turn is Turn.VERDICT and isinstance(message, Welcome):
            if not hmac.compare_digest(message.mac, self._expected):
                raise LinkError("the shadow does not have the token: is something else listening at its address?")
        else:
            raise _unexpected(message, turn)
        self.welcome, self._turn = message, Turn.DONE
        return None

    def _prove(self, challenge: Challenge) -> Proof:
        if self._token is None:
            raise LinkError("the shadow wants a token and none was given here")
        nonce = secrets.token_bytes(NONCE_BYTES)
        said = challenge.nonce + nonce + messages.pack(self.hello)
        self._expected = _mac(self._token, _SERVER, said)
        self._turn = Turn.VERDICT
        return Proof(nonce, _mac(self._token, _CLIENT, said))


class ServerHandshake:
    """The end that listens. When `is_proven`, the program looks at `hello` and says `welcome(...)` or `refuse(...)`."""

    def __init__(self, token: bytes | None = None) -> None:
        self._token = _checked(token)
        self._turn = Turn.HELLO
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._meta = b""
        self._hello: Hello | None = None
        self._mac = b""

    @property
    def turn(self) -> Turn:
        return self._turn

    @property
    def is_proven(self) -> bool:
        """Whether the client has proven the token (or need not), and waits for the verdict."""
        return self._turn in (Turn.VERDICT, Turn.DONE)

    @property
    def hello(self) -> Hello:
        """What the client is and wants. LinkError before it is proven."""
        if not self.is_proven or self._hello is None:
            raise LinkError("the client has not proven itself")
        return self._hello

    def receive(self, message: Message, meta: bytes) -> Challenge | Refused | None:
        """Take in what the client says (and its bytes); what to send next, if anything. After Refused, close."""
        turn, self._turn = self._turn, Turn.FAILED
        if turn is Turn.HELLO and isinstance(message, Hello):
            return self._listen(message, meta)
        if turn is Turn.PROOF and isinstance(message, Proof):
            return self._check(message)
        raise _unexpected(message, turn)

    def welcome(
        self, *, generation: int, step: int, received: int, base: int, segment: str, offset: int, pid: int
    ) -> Welcome:
        """The client may go on: what to send. The handshake is over."""
        self._end(Turn.DONE)
        return Welcome(self._mac, generation, step, received, base, segment, offset, pid)

    def refuse(self, reason: str) -> Refused:
        """The client may not go on: what to send before closing."""
        self._end(Turn.FAILED)
        return Refused(reason)

    def _listen(self, hello: Hello, meta: bytes) -> Challenge | Refused | None:
        if hello.version != VERSION:
            return Refused(f"the client speaks version {hello.version} of the link, this shadow {VERSION}: use one Everstep")
        self._hello, self._meta = hello, meta
        if self._token is None:
            self._turn = Turn.VERDICT
            return None
        self._turn = Turn.PROOF
        return Challenge(self._nonce)

    def _check(self, proof: Proof) -> Refused | None:
        assert self._token is not None
        said = self._nonce + proof.nonce + self._meta
        if not hmac.compare_digest(proof.mac, _mac(self._token, _CLIENT, said)):
            return Refused("the token is wrong")
        self._mac = _mac(self._token, _SERVER, said)
        self._turn = Turn.VERDICT
        return None

    def _end(self, turn: Turn) -> None:
        if self._turn is not Turn.VERDICT:
            raise UsageError(f"a verdict on a handshake that waits for {self._turn.value}")
        self._turn = turn


def _mac(token: bytes, label: bytes, said: bytes) -> bytes:
    return hmac.new(token, label + said, hashlib.sha256).digest()


def _checked(token: bytes | None) -> bytes | None:
    if token is not None and not token:
        raise UsageError("the token is empty: give one of at least 16 random bytes, or none")
    return token


def _unexpected(message: Message, turn: Turn) -> LinkError:
    return LinkError(f"{type(message).__name__} where the handshake waits for {turn.value}")
