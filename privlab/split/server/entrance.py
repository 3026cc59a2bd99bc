"""The entrance of a server: connections whose callers have not shown the token make room for others."""

import ipaddress
import os
import socket
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote

_DESCRIPTORS = Path("/dev/fd")
"""Where Linux and macOS list the descriptors of a process; where it is missing, no connection is closed here."""

Peer = tuple[str, int]
"""The address and the port from which a connection comes."""


class Entrance:
    """Closes the oldest connections from an address that has too many of them without the token.

    gRPC has one ceiling for all connections, which a caller without the token could fill alone.

    Args:
        most: the most connections from one address whose callers have not shown the token.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known = set[Peer]()
        self._order = dict[Peer, None]()

    def show(self, peer: str) -> None:
        """Note that the caller with this name in gRPC, such as "ipv4:127.0.0.1:5000", has shown the token."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if port.isdecimal():  # not one by a Unix socket
            self._known.add((_plain(host.strip("[]")), int(port)))

    def make_room(self, port: int) -> int:
        """Close the oldest connections to a port of this process that are too many; return how many were closed."""
        with ExitStack() as closing:
            connections = {peer: closing.enter_context(connection) for peer, connection in _connections(port)}
            self._known &= connections.keys()
            # Those that were there before come first, in the order in which they came.
            self._order = dict.fromkeys([*(peer for peer in self._order if peer in connections), *connections])
            unknown = defaultdict[str, list[Peer]](list)
            for peer in self._order:
                if peer not in self._known:
                    unknown[peer[0]].append(peer)
            too_many = [peer for peers in unknown.values() for peer in peers[: max(0, len(peers) - self._most)]]
            for peer in too_many:
                _shut(connections[peer])
        return len(too_many)


def _connections(port: int) -> Iterator[tuple[Peer, socket.socket]]:
    """Yield the peer of each connection to a port of this process, and the connection under another descriptor."""
    for path in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:  # it was closed meanwhile
            continue
        try:
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if internet and connection.getsockname()[1] == port:
                host, peer_port, *_ = connection.getpeername()  # the listening socket has none, which is an OSError
                yield (_plain(host), peer_port), connection
                continue
        except OSError:
            pass
        connection.close()


def _shut(connection: socket.socket) -> None:
    """End a connection; gRPC, which has the same one under its own descriptor, then drops it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the caller was faster
        return


def _plain(host: str) -> str:
    """Return an address in one form; an IPv4 address may come as one of IPv6."""
    found = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)
