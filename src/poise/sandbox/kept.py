"""Output, cut in its middle."""

import os


class Kept:
    """The first and the last half of a stream of at most ``capacity`` bytes, and how much fell between."""

    def __init__(self, capacity: int) -> None:
        self.half = capacity // 2
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def read_from(self, fd: int) -> int | None:
        """Takes at most 64 KiB of what is there; the number of bytes, 0 at the end of the stream, None for "later"."""
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return None
        self.add(chunk)
        return len(chunk)

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self.half - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[room:]
        del self.tail[: -self.half]

    def drain(self, fd: int, max_bytes: int) -> None:
        """Takes everything that is there, until ``max_bytes`` have been seen."""
        while self.total <= max_bytes and self.read_from(fd):
            pass

    @property
    def num_cut(self) -> int:
        return self.total - len(self.head) - len(self.tail)

    def text(self) -> str:
        if not self.num_cut:
            return (self.head + self.tail).decode(errors="replace")
        head, tail = self.head.decode(errors="replace"), self.tail.decode(errors="replace")
        return f"{head}\n[... {self.num_cut} bytes cut ...]\n{tail}"
