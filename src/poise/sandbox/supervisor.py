"""The fork server's trusted half: takes cells from the trainer, gives them to interpreters, watches their limits.

One event loop. It never blocks on an interpreter and believes nothing that one says: a cell is over when two bytes say
so or when the interpreter is gone; between cells an interpreter is stopped, so that it uses no time.
"""

import array
import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from poise.sandbox import workdirs
from poise.sandbox.interpreters import Forks, Interpreter
from poise.sandbox.kept import Kept
from poise.sandbox.wire import Wire

NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
FLOOD_BYTES = 1 << 20  # output beyond this stops the cell
GRACE_S = 1.0  # an interrupted cell has this long to end
TICK_S = 0.1  # how often CPU time and files are looked at
IDLE_SHARE = 0.2  # a cell that uses less of a core than this takes no other cell's place


class Session:
    """What the trainer holds: outlives the interpreters that it loses."""

    def __init__(self, link: "Link", message: dict[str, Any]) -> None:
        self.link, self.number = link, message["session"]
        self.limits, self.seed = message["limits"], message["seed"]
        self.interpreter: Interpreter | None = None
        self.cell: dict[str, Any] | None = None  # asked for and not yet started


class Link:
    """A connection of one event loop of the trainer, and its sessions."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.sessions: dict[int, Session] = {}


class Supervisor:
    """``control``: the trainer's socket, over which connections come; the loop ends when it closes."""

    def __init__(self, control: socket.socket, forks: Forks) -> None:
        self.control, self.forks = control, forks
        self.selector = selectors.DefaultSelector()
        self.links: list[Link] = []
        self.queue: deque[Session] = deque()  # with a cell that could start
        self.starting: set[Session] = set()  # whose interpreter is being made for a cell that waits
        self.running: list[Session] = []
        self.is_open = True
        self.last_tick = 0.0
        self.due = math.inf  # when it has to look at the running cells next

    def run(self) -> None:
        self.watch(self.control, self.accept)
        self.watch(self.forks.commands, self.forks.receive_ends)
        while self.is_open:
            for key, _ in self.selector.select(self._time_left()):
                if key.fileobj in self.selector.get_map():  # an earlier event may have closed it
                    key.data()
            self.check_limits()
            self.dispatch()
        for link in list(self.links):
            self.hang_up(link)
        self.forks.wait_for_ends()

    def watch(self, file: Any, callback: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, callback)

    def unwatch(self, file: Any) -> None:
        if file in self.selector.get_map():
            self.selector.unregister(file)

    def flush(self, wire: Wire) -> None:
        """Sends what can be sent, and the rest when there is room."""
        wire.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.unsent else 0)
        key = self.selector.get_key(wire)
        if key.events != events:
            self.selector.modify(wire, events, key.data)

    # The trainer's side

    def accept(self) -> None:
        fds = array.array("i")
        _, ancillary, _, _ = self.control.recvmsg(1, socket.CMSG_LEN(fds.itemsize))
        for _, _, payload in ancillary:
            fds.frombytes(payload[: fds.itemsize])
        if not fds:
            self.is_open = False
            return
        link = Link(Wire(socket.socket(fileno=fds[0])))
        self.links.append(link)
        self.watch(link.wire, lambda: self.on_link(link))

    def on_link(self, link: Link) -> None:
        try:
            self.flush(link.wire)
            messages = link.wire.receive()
        except OSError:
            messages = None
        if messages is None:
            self.hang_up(link)
            return
        for message in messages:
            self.on_message(link, message)

    def hang_up(self, link: Link) -> None:
        for session in list(link.sessions.values()):
            self.close(session)
        self.unwatch(link.wire)
        link.wire.close()
        self.links.remove(link)

    def answer(self, session: Session, message: dict[str, Any]) -> None:
        wire = session.link.wire
        try:
            wire.send({"session": session.number, **message})
            self.flush(wire)
        except OSError:
            return  # the end of this link arrives as an event of its own

    def on_message(self, link: Link, message: dict[str, Any]) -> None:
        if message["op"] == "open":
            session = link.sessions[message["session"]] = Session(link, message)
            if not message["is_lazy"]:
                self.open(session)
            return
        known = link.sessions.get(message["session"])
        if known is None:
            return  # closed a moment ago
        if message["op"] == "close":
            self.close(known)
            return
        known.cell = message
        if known.interpreter is None or known.interpreter.is_ready:
            self.queue.append(known)

    # Sessions

    def open(self, session: Session) -> None:
        try:
            interpreter = session.interpreter = self.forks.make(session.limits, session.seed)
        except OSError as error:
            self.fail(session, str(error))
            return
        self.watch(interpreter.control, lambda: self.on_control(session, interpreter))
        self.watch(interpreter.output, lambda: self.on_output(session, interpreter))

    def fail(self, session: Session, problem: str) -> None:
        """Nothing can be run: answers whatever was asked."""
        session.cell = None
        self._leave_queues(session)
        self.answer(session, {"op": "failed", "error": problem})

    def close(self, session: Session) -> None:
        session.link.sessions.pop(session.number, None)
        self._leave_queues(session)
        if session.interpreter is not None:
            self.end(session)

    def end(self, session: Session, on_end: Callable[[int], None] = lambda status: None) -> None:
        interpreter = session.interpreter
        assert interpreter is not None
        self.unwatch(interpreter.control)
        self.unwatch(interpreter.output)
        session.interpreter = None
        self.forks.end(interpreter, on_end)

    def _leave_queues(self, session: Session) -> None:
        if session in self.running:
            self.running.remove(session)
        if session in self.queue:
            self.queue.remove(session)
        self.starting.discard(session)

    # Cells

    def dispatch(self) -> None:
        """Starts cells while there is room."""
        while self.queue and self._num_busy() < NUM_CORES:
            session = self.queue.popleft()
            if session.interpreter is not None:
                self.start_cell(session)
            else:
                self.starting.add(session)
                self.open(session)

    def _num_busy(self) -> int:
        is_idle = [session.interpreter is not None and session.interpreter.is_idle for session in self.running]
        return len(self.starting) + is_idle.count(False)

    def start_cell(self, session: Session) -> None:
        interpreter, cell = session.interpreter, session.cell
        assert interpreter is not None
        assert cell is not None
        session.cell, interpreter.cell = None, cell
        self.running.append(session)
        code = cell["code"].encode(errors="replace")
        interpreter.control.unsent += len(code).to_bytes(4, "big") + bytes([cell["is_once"]]) + code
        interpreter.stopped, interpreter.is_idle = "", False
        interpreter.started = time.monotonic()
        interpreter.deadline = interpreter.started + interpreter.limits["wall_s"]
        interpreter.cpu_at_start = interpreter.cpu_seen = interpreter.cpu_s()
        os.kill(interpreter.pid, signal.SIGCONT)
        self.flush_cell(session, interpreter)

    def flush_cell(self, session: Session, interpreter: Interpreter) -> None:
        try:
            self.flush(interpreter.control)
        except OSError:
            self.lose(session, interpreter)

    def on_control(self, session: Session, interpreter: Interpreter) -> None:
        self.flush_cell(session, interpreter)
        if session.interpreter is not interpreter:
            return
        try:
            said = interpreter.control.socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not interpreter.is_ready:
            self.on_start(session, interpreter, said)
        elif interpreter.cell is not None and len(said) == 2 and said[:1] == b"d":
            self.finish(session, interpreter, said[1])
        else:
            self.lose(session, interpreter)

    def on_start(self, session: Session, interpreter: Interpreter, said: bytes) -> None:
        if said == b"r":
            interpreter.is_ready = True
            self.answer(session, {"op": "opened", "error": None})
            self.starting.discard(session)
            if session.cell is not None:
                self.queue.appendleft(session)
        elif said:
            interpreter.problem += said
        else:
            self.end(session)
            self.fail(session, interpreter.problem[1:].decode(errors="replace") or "an interpreter ended at its start")

    def on_output(self, session: Session, interpreter: Interpreter) -> None:
        if interpreter.kept.read_from(interpreter.output) == 0:
            self.unwatch(interpreter.output)  # closed by the code, which may go on without it
        if interpreter.kept.total > FLOOD_BYTES and not interpreter.stopped and interpreter.cell is not None:
            self.stop(session, interpreter, "flood")

    def lose(self, session: Session, interpreter: Interpreter) -> None:
        """The interpreter ended by itself, or says what it must not."""
        if interpreter.cell is None:
            self.end(session)
            return
        wall_s = time.monotonic() - interpreter.started

        def on_end(status: int) -> None:
            interpreter.kept.drain(interpreter.output, FLOOD_BYTES)
            self.answer_cell(session, interpreter, status, wall_s, is_lost=True)

        self._leave_queues(session)
        self.end(session, on_end)

    def stop(self, session: Session, interpreter: Interpreter, reason: str) -> None:
        """A limit was reached: a cell of a session may end by itself first, which keeps its variables."""
        assert interpreter.cell is not None
        is_last_chance = bool(interpreter.stopped) or interpreter.cell["is_once"] or reason == "files"
        interpreter.stopped = interpreter.stopped or reason
        if not is_last_chance:
            os.kill(interpreter.pid, signal.SIGINT)
            interpreter.deadline = time.monotonic() + GRACE_S
            return
        interpreter.kept.drain(interpreter.output, FLOOD_BYTES)
        self.end(session)
        self._leave_queues(session)
        wall_s = time.monotonic() - interpreter.started
        self.answer_cell(session, interpreter, -signal.SIGKILL, wall_s, is_lost=True)

    def finish(self, session: Session, interpreter: Interpreter, status: int) -> None:
        """The cell has come to its end."""
        wall_s = time.monotonic() - interpreter.started
        interpreter.kept.drain(interpreter.output, FLOOD_BYTES)
        os.kill(interpreter.pid, signal.SIGSTOP)  # until the next cell
        self._leave_queues(session)
        self.answer_cell(session, interpreter, status, wall_s, is_lost=False)

    def answer_cell(
        self, session: Session, interpreter: Interpreter, status: int, wall_s: float, *, is_lost: bool
    ) -> None:
        kept, interpreter.kept = interpreter.kept, Kept(interpreter.limits["num_output_bytes"])
        interpreter.cell = None
        answer = {
            "op": "done",
            "error": None,
            "output": kept.text(),
            "num_cut_bytes": kept.num_cut,
            "exit_status": status,
            "stopped": interpreter.stopped,
            "is_lost": is_lost,
            "wall_s": wall_s,
        }
        self.answer(session, answer)

    # Limits

    def _time_left(self) -> float | None:
        if not self.running:
            self.due = math.inf
            return None
        now = time.monotonic()
        deadline = min(session.interpreter.deadline for session in self.running if session.interpreter)
        self.due = max(now, min(deadline, self.last_tick + TICK_S))
        return self.due - now

    def check_limits(self) -> None:
        now = time.monotonic()
        # Time in which this process was not let run: where the machine stood still, the cells did as well.
        self._grant(now - self.due)
        is_tick = now - self.last_tick >= TICK_S
        for session in list(self.running):
            interpreter = session.interpreter
            assert interpreter is not None
            if now >= interpreter.deadline:
                self.stop(session, interpreter, "time")
            elif is_tick:
                self._look_at(session, interpreter, now - self.last_tick)
        if is_tick:
            self.last_tick = now

    def _grant(self, late_s: float) -> None:
        for session in self.running if late_s > 0 else ():
            assert session.interpreter is not None
            session.interpreter.deadline += late_s

    def _look_at(self, session: Session, interpreter: Interpreter, elapsed_s: float) -> None:
        """CPU time and files of a running cell."""
        cpu_s = interpreter.cpu_s()
        is_young = time.monotonic() - interpreter.started < TICK_S
        interpreter.is_idle = not is_young and cpu_s - interpreter.cpu_seen < IDLE_SHARE * elapsed_s
        interpreter.cpu_seen = cpu_s
        if interpreter.stopped:
            return
        if cpu_s - interpreter.cpu_at_start > interpreter.limits["cpu_s"]:
            self.stop(session, interpreter, "cpu")
        elif interpreter.work_dir and workdirs.is_too_large(interpreter.work_dir, interpreter.limits["file_mib"]):
            self.stop(session, interpreter, "files")
