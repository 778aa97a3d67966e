"""A relay between two ends of TCP connections, which can delay, stall, silence and cut them."""

import random
import socket
import threading
import time
from contextlib import suppress

CHUNK = 1 << 16


class Relay:
    """Listens on `port` of loopback and passes everything on to `target`, a port there, until `close`.

    Each chunk is `delay_s` late, and one in `stalls_every` another `stall_s`: as on a link that loses packets, whose
    bytes TCP sends again. After `silence` nothing passes and nothing is closed: a cable that is out.
    """

    def __init__(self, target: int, *, delay_s: float = 0.0, stalls_every: int = 0, stall_s: float = 0.0) -> None:
        self._target, self._delay_s, self._stall = target, delay_s, (stalls_every, stall_s)
        self._random = random.Random(1)
        self._silent = threading.Event()
        self._connections: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Pass nothing on any more, and keep all connections."""
        self._silent.set()

    def close(self) -> None:
        """Close all connections."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listening.accept()
                far = self._connect()
                self._connections += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _connect(self) -> socket.socket:
        """The target may not listen yet."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._target))
            except ConnectionRefusedError:
                time.sleep(0.05)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        every, stall_s = self._stall
        with suppress(OSError):
            while data := source.recv(CHUNK):
                time.sleep(self._delay_s + (stall_s if every and self._random.randrange(every) == 0 else 0.0))
                if self._silent.is_set():
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
