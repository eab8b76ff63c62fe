"""Connections between the launchers of a job's nodes. Standard library only.

Node 0 listens. The other launchers connect and stay connected, so that each side notices at once if the other one ends.
The launchers exchange which nodes take part, the port of the processes' store, and how each start ended. A message is a
JSON object on one line. There is no authentication, as in torch's own store: use it in trusted networks only.
"""

import json
import re
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from titan_mi100.errors import UserError

_HELLO = "titan_mi100 launcher 1"
_PORTS = 4  # node 0 listens on the first free one of so many ports, beginning with the port of --rdzv
_LONGEST = 1 << 16  # bytes of a message
_SLOW = 10.0  # seconds: time-out of the handshake and of sending a message
# A host that loses power closes no connection. TCP keepalive notices it after 20 + 3 x 10 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))

Message = dict[str, Any]


class Endpoint(NamedTuple):
    """This node's place in the job, from the command line.

    Attributes:
        least, most: how many nodes the job may have.
        rank: this node's number, from 0 to most - 1.
        host, port: address of node 0.
        patience: seconds to wait for the other nodes.
    """

    least: int
    most: int
    rank: int
    host: str
    port: int
    patience: int = 600


OPTIONS = ("nnodes", "node_rank", "rdzv", "rdzv_timeout")


def parse_place(given: Mapping[str, str]) -> Endpoint | None:
    """Parse the options about nodes. None: the job has one node.

    Args:
        given: option (one of OPTIONS) -> its value.

    Raises:
        UserError: an option is missing or invalid.
    """
    nodes = re.fullmatch("(?:([1-9][0-9]{0,3}):)?([1-9][0-9]{0,3})", given.get("nnodes", "1"), re.ASCII)
    if nodes is None or (least := int(nodes[1] or nodes[2])) > (most := int(nodes[2])):
        raise UserError(f"--nnodes must be a number, or LEAST:MOST, not {given['nnodes']!r}; e.g. 4, or 3:4")
    if most == 1:
        if extra := given.keys() - {"nnodes"}:
            raise UserError(f"--{min(extra)} is for several nodes; leave it out, or add --nnodes, e.g. --nnodes 2")
        return None
    example = f"--nnodes {nodes[0]} --node_rank 0 --rdzv first-node:29400, with 1, 2 ... as node_rank on the others"
    if not re.fullmatch("[0-9]{1,4}", rank := given.get("node_rank", ""), re.ASCII) or int(rank) >= most:
        raise UserError(f"--node_rank must be 0 to {most - 1}, one for each node, not {rank!r}; e.g. {example}")
    address = re.fullmatch(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s:/]+):([0-9]{1,5})", given.get("rdzv", ""), re.ASCII)
    if address is None or not 0 < int(address[2]) < 65536 - _PORTS:
        raise UserError(f"--rdzv must be HOST:PORT of node 0, not {given.get('rdzv', '')!r}; e.g. {example}")
    if not re.fullmatch("[1-9][0-9]{0,5}", patience := given.get("rdzv_timeout", "600"), re.ASCII):
        raise UserError(f"--rdzv_timeout must be seconds, not {patience!r}")
    return Endpoint(least, most, int(rank), address[1].strip("[]"), int(address[2]), int(patience))


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    """Wait until it can be read. With poll: select refuses descriptors above 1,023."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(1000 * max(0.0, seconds)))


class Link:
    """A connection to another launcher."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._received = connection, b""
        connection.settimeout(_SLOW)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, setting in _KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), setting)

    def close(self) -> None:
        self._socket.close()

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError: the connection is lost."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> Message | None:
        """The next message; None: none has arrived within this time.

        Raises:
            OSError: the connection is lost, or the other side sends something that is not a message.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not _is_readable(self._socket, until - time.monotonic()):
                return None
            part = self._socket.recv(_LONGEST)
            self._received += part
            if not part or len(self._received) > 2 * _LONGEST:
                raise ConnectionError("the connection was closed" if not part else "the message is too long")
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("the message is not a JSON object")
        return message


class Host:
    """Node 0's side: accepts the other launchers and keeps their connections.

    Attributes:
        links: node number -> connection, of the nodes that are connected.
        port: the port that it listens on.
    """

    def __init__(self, place: Endpoint, processes: int) -> None:
        """Listen on the first free port.

        Args:
            processes: processes per node; a node with another number is refused.

        Raises:
            OSError: none of the ports is free.
        """
        self.links: dict[int, Link] = {}
        self._place, self._processes = place, processes
        for port in range(place.port, place.port + _PORTS):
            try:
                self._server, self.port = _listen(port), port
                return
            except OSError as error:
                failed = error
        raise OSError(failed.errno, f"cannot listen on any of the ports {place.port} to {port}: {failed.strerror}")

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        for link in self.links.values():
            link.close()

    def admit(self, seconds: float) -> str:
        """Accept one more node, if one connects within this time.

        Returns:
            A message for the log if a node was refused, else "".
        """
        if not _is_readable(self._server, seconds):
            return ""
        link = Link(self._server.accept()[0])
        try:
            if (hello := link.receive(_SLOW)) is None or hello.get("hello") != _HELLO:
                raise ConnectionError("no launcher")
            if refusal := self._refusal(hello):
                link.send(refused=refusal)
            else:
                link.send(welcome=_HELLO)
                self.links[hello["node"]] = link
                return ""
        except (OSError, KeyError):
            refusal = ""  # a port scan, or a launcher that has ended meanwhile
        link.close()
        return refusal

    def _refusal(self, hello: Message) -> str:
        """Why a launcher is refused; "": it is accepted."""
        node, limits = hello.get("node"), self._place
        if not isinstance(node, int) or not 0 < node < limits.most or hello.get("nodes") != [limits.least, limits.most]:
            return f"a launcher connected as node {node} of {hello.get('nodes')}; --nnodes must be equal on all nodes"
        if hello.get("processes") != self._processes:
            counts = f"{self._processes} processes, node {node} {hello.get('processes')}"
            return f"node 0 has {counts}; --nproc_per_node must be equal on all nodes"
        if node in self.links:
            return f"two launchers connected as node {node}; each node needs its own --node_rank"
        return ""

    def tell(self, **message: Any) -> None:
        """Send a message to all nodes. The next `hear` drops nodes whose connection is lost."""
        for link in self.links.values():
            with suppress(OSError):
                link.send(**message)

    def hear(self) -> list[tuple[int, Message | None]]:
        """The new messages, as (node, message); message None: the connection is lost, and the node is dropped."""
        messages: list[tuple[int, Message | None]] = []
        for node, link in list(self.links.items()):
            try:
                while (message := link.receive(0)) is not None:
                    messages.append((node, message))
            except OSError:
                link.close()
                del self.links[node]
                messages.append((node, None))
        return messages


def join(place: Endpoint, processes: int) -> Link | None:
    """Try once to connect to node 0's launcher. None: it does not listen yet.

    Raises:
        UserError: node 0 refuses this node, because it belongs to another job or was started with other options.
    """
    hello = {"node": place.rank, "nodes": [place.least, place.most], "processes": processes}
    for port in range(place.port, place.port + _PORTS):
        link = None
        try:
            link = Link(socket.create_connection((place.host, port), timeout=_SLOW))
            link.send(hello=_HELLO, **hello)
            answer = link.receive(_SLOW) or {}
        except OSError:
            answer = {}  # no program listens there, or another program
        if answer.get("welcome") == _HELLO:
            return link
        if link is not None:
            link.close()
        if "refused" in answer:
            raise UserError(f"node 0 at {place.host}:{port} refuses this node: {answer['refused']}")
    return None


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this host that the kernel gives to nobody else meanwhile; a server that names it can listen on it.

    A socket that is bound and does not listen keeps it: the kernel then chooses it for no other program's socket or
    connection. SO_REUSEADDR, which servers (those of torch, too) set, lets a second socket be bound beside it.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", 0))
        yield kept.getsockname()[1]


def _listen(port: int) -> socket.socket:
    """Listen on all addresses of this host: its name may resolve to one that the other nodes cannot reach."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # the kernel has no IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)
