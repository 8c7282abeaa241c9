"""Messages over a socket that never blocks: 4 bytes of length, then JSON."""

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!I")


class Wire:
    """One end of a stream socket. What cannot be sent yet waits in ``unsent`` until ``flush`` is called again."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self.unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Raises ``OSError`` where the other side is gone."""
        payload = json.dumps(message).encode()
        self.unsent += LENGTH.pack(len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        while self.unsent:
            try:
                del self.unsent[: self.socket.send(self.unsent)]
            except BlockingIOError:
                return

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that are whole by now. None: the other side is gone."""
        try:
            chunk = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not chunk:
            return None
        self._received += chunk
        messages = []
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[LENGTH.size : end]))
            del self._received[:end]
        return messages

    def close(self) -> None:
        self.socket.close()
