"""The log on its way to a shadow: on this host a Unix socket beside shared memory, to others TCP.

    messages    what is said
    protocol    bytes <-> messages, no I/O: Connection, encode
    auth        who says it, no I/O: ClientHandshake, ServerHandshake
    sockets     a link over a connected socket: Channel; introduce (client), listen_to, admit, refuse (server)
    addresses   how sockets come to be connected: connect, listen, accept, TLS, must_have_token

docs/link.md is the specification.
"""
