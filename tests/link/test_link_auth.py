"""The handshake lets nobody in without the token, whatever they have overheard."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import pytest
from link_samples import HELLO, SAMPLES

from everstep.errors import LinkError, LinkRefused, UsageError
from everstep.link import messages as m
from everstep.link.auth import ClientHandshake, ServerHandshake, Turn

TOKEN = b"correct horse battery staple"


def meet(client: ClientHandshake, server: ServerHandshake) -> list[m.Message]:
    """The whole handshake between honest ends; all that an eavesdropper hears."""
    heard: list[m.Message] = [client.start()]
    while client.welcome is None:
        reply = server.receive(heard[-1], m.pack(heard[-1]))
        heard.append(reply if reply is not None else welcome(server))
        answer = client.receive(heard[-1])
        if answer is not None:
            heard.append(answer)
    return heard


def welcome(server: ServerHandshake) -> m.Welcome:
    return server.welcome(generation=7, step=100, received=101, base=64, segment="", offset=0, pid=1)


def hear(server: ServerHandshake, message: m.Message) -> m.Message | None:
    return server.receive(message, m.pack(message))


def test_with_the_right_token_both_ends_know_each_other() -> None:
    client, server = ClientHandshake(HELLO, TOKEN), ServerHandshake(TOKEN)
    heard = meet(client, server)
    assert [type(h) for h in heard] == [m.Hello, m.Challenge, m.Proof, m.Welcome]
    assert server.hello == HELLO
    assert client.welcome is not None
    assert client.welcome.step == 100
    assert client.turn is server.turn is Turn.DONE


def test_the_token_is_never_sent() -> None:
    heard = meet(ClientHandshake(HELLO, TOKEN), ServerHandshake(TOKEN))
    assert not any(TOKEN in m.pack(h) for h in heard)


def test_without_a_token_there_is_no_challenge() -> None:
    heard = meet(ClientHandshake(HELLO), ServerHandshake())
    assert [type(h) for h in heard] == [m.Hello, m.Welcome]


@pytest.mark.parametrize("token", [b"wrong", TOKEN[:-1], TOKEN + b"\0x"])
def test_a_wrong_token_is_refused_and_the_client_is_told(token: bytes) -> None:
    client, server = ClientHandshake(HELLO, token), ServerHandshake(TOKEN)
    challenge = hear(server, client.start())
    assert isinstance(challenge, m.Challenge)
    proof = client.receive(challenge)
    assert proof is not None
    refused = hear(server, proof)
    assert refused == m.Refused("the token is wrong")
    assert not server.is_proven
    with pytest.raises(LinkRefused, match="the token is wrong"):
        client.receive(refused)


def test_what_an_unproven_client_said_cannot_be_read() -> None:
    server = ServerHandshake(TOKEN)
    with pytest.raises(LinkError, match="not proven"):
        _ = server.hello
    hear(server, HELLO)
    with pytest.raises(LinkError, match="not proven"):
        _ = server.hello
    for verdict in (lambda: welcome(server), lambda: server.refuse("no")):
        with pytest.raises(UsageError, match="waits for Proof"):
            verdict()


def test_a_proof_that_was_overheard_does_not_open_another_connection() -> None:
    heard = meet(ClientHandshake(HELLO, TOKEN), ServerHandshake(TOKEN))
    server = ServerHandshake(TOKEN)
    assert hear(server, heard[0]) != heard[1], "the nonce must be new in every connection"
    assert isinstance(hear(server, heard[2]), m.Refused)
    assert not server.is_proven


def test_a_welcome_that_was_overheard_does_not_prove_a_server() -> None:
    heard = meet(ClientHandshake(HELLO, TOKEN), ServerHandshake(TOKEN))
    client = ClientHandshake(HELLO, TOKEN)
    client.start()
    client.receive(heard[1])
    with pytest.raises(LinkError, match="does not have the token"):
        client.receive(heard[3])
    assert client.welcome is None


def test_a_proof_sent_back_does_not_prove_a_server() -> None:
    client = ClientHandshake(HELLO, TOKEN)
    client.start()
    proof = client.receive(m.Challenge(bytes(32)))
    assert proof is not None
    with pytest.raises(LinkError, match="does not have the token"):
        client.receive(m.Welcome(proof.mac, 7, 1, 1, 1, "", 0, 1))


@pytest.mark.parametrize("mac", [b"", bytes(32), b"short"])
def test_a_welcome_without_the_right_mac_does_not_prove_a_server(mac: bytes) -> None:
    client = ClientHandshake(HELLO, TOKEN)
    client.start()
    client.receive(m.Challenge(bytes(32)))
    with pytest.raises(LinkError, match="does not have the token"):
        client.receive(m.Welcome(mac, 7, 1, 1, 1, "", 0, 1))


@pytest.mark.parametrize("mac", [b"", bytes(32), b"short"])
def test_a_proof_without_the_right_mac_is_refused(mac: bytes) -> None:
    server = ServerHandshake(TOKEN)
    hear(server, HELLO)
    assert isinstance(hear(server, m.Proof(bytes(32), mac)), m.Refused)
    assert not server.is_proven


def test_a_proof_is_for_the_hello_that_was_said() -> None:
    client, server = ClientHandshake(HELLO, TOKEN), ServerHandshake(TOKEN)
    client.start()
    other = msgspec.structs.replace(HELLO, generation=8)
    challenge = hear(server, other)
    assert isinstance(challenge, m.Challenge)
    proof = client.receive(challenge)
    assert proof is not None
    assert isinstance(hear(server, proof), m.Refused), "someone between the two changed the Hello"


def test_the_proof_covers_fields_that_this_version_does_not_know() -> None:
    meta = msgspec.msgpack.encode({**msgspec.msgpack.decode(m.pack(HELLO)), "flavour": "new"})
    server = ServerHandshake(TOKEN)
    challenge = server.receive(m.unpack(meta), meta)
    assert isinstance(challenge, m.Challenge)
    said = b"everstep link client 1\0" + challenge.nonce + bytes(32) + meta
    assert hear(server, m.Proof(bytes(32), hmac.new(TOKEN, said, hashlib.sha256).digest())) is None
    assert server.is_proven


def test_a_client_with_a_token_leaves_a_server_that_does_not_ask_for_it() -> None:
    client, server = ClientHandshake(HELLO, TOKEN), ServerHandshake()
    assert hear(server, client.start()) is None
    with pytest.raises(LinkError, match="did not ask for the token"):
        client.receive(welcome(server))
    assert client.welcome is None


def test_a_client_without_a_token_says_that_it_needs_one() -> None:
    client = ClientHandshake(HELLO)
    client.start()
    with pytest.raises(LinkError, match="none was given"):
        client.receive(m.Challenge(bytes(32)))


def test_an_empty_token_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="empty"):
        ServerHandshake(b"")
    with pytest.raises(UsageError, match="empty"):
        ClientHandshake(HELLO, b"")


def test_another_version_is_refused_with_words() -> None:
    server = ServerHandshake(TOKEN)
    refused = hear(server, msgspec.structs.replace(HELLO, version=m.VERSION - 1))
    assert isinstance(refused, m.Refused)
    assert f"version {m.VERSION - 1}" in refused.reason
    assert server.turn is Turn.FAILED


def test_the_program_can_refuse_a_proven_client() -> None:
    client, server = ClientHandshake(HELLO), ServerHandshake()
    hear(server, client.start())
    with pytest.raises(LinkRefused, match="older generation"):
        client.receive(server.refuse("an older generation"))
    assert server.turn is Turn.FAILED


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_message_at_the_wrong_time_ends_the_handshake(token: bytes | None) -> None:
    for message in SAMPLES:
        if not isinstance(message, m.Hello):
            server = ServerHandshake(token)
            with pytest.raises(LinkError, match="waits for Hello"):
                hear(server, message)
            with pytest.raises(LinkError, match="it failed"):
                hear(server, HELLO)
        if not isinstance(message, m.Challenge | m.Welcome | m.Refused):
            client = ClientHandshake(HELLO, token)
            client.start()
            with pytest.raises(LinkError, match="waits for Challenge"):
                client.receive(message)
    server = ServerHandshake(TOKEN)
    hear(server, HELLO)
    with pytest.raises(LinkError, match="waits for Proof"):
        hear(server, HELLO)


def test_after_its_end_a_handshake_takes_nothing_more() -> None:
    client, server = ClientHandshake(HELLO, TOKEN), ServerHandshake(TOKEN)
    heard = meet(client, server)
    with pytest.raises(LinkError, match="it is over"):
        client.receive(heard[3])
    with pytest.raises(LinkError, match="it is over"):
        hear(server, heard[2])
    with pytest.raises(UsageError, match="new one"):
        client.start()
