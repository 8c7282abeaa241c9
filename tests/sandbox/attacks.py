"""What hostile code tries. Each attack is a cell and says how its success shows.

``harm`` looks at the world outside (files, listeners, processes) where it can, else at what the code printed: the word
REACHED, or the secret. The same code, run without a sandbox against the same targets, must do the harm.
@NAME@ stands for a target: see ``world.World``.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

_CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(x86_64, aarch64, *arguments):
    number = x86_64 if os.uname().machine == 'x86_64' else aarch64
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    print(result, os.strerror(ctypes.get_errno()))
    return result
"""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """``needs_root``: only root can do it at all, so others have no control. ``may_lack``: some kernels lack it."""

    name: str
    code: str
    harm: Callable[..., bool]
    needs_root: bool = False
    may_lack: bool = False


def printed(world, text: str) -> bool:
    return "REACHED" in text


def told(world, text: str) -> bool:
    return world.SECRET in text


def changed(world, text: str) -> bool:
    return world.victim_state() != world.victim_before


def connected(world, text: str) -> bool:
    return world.was_reached()


def signalled(world, text: str) -> bool:
    return world.victim_process_state() != world.process_before


def survived(world, text: str) -> bool:
    return world.has_process_named(world.places["daemon"])


def _reads(name, code, **more):
    return Attack(name=name, code=code, harm=told, **more)


def _writes(name, code, **more):
    return Attack(name=name, code=code, harm=changed, **more)


def _calls(name, code, **more):
    return Attack(name=name, code=_CALL + code, harm=printed, **more)


READING = [
    _reads("read a file", "print(open('@secret@').read())"),
    _reads("read through a link", "import os; os.symlink('@secret@', 'link'); print(open('link').read())"),
    _reads("list a folder", "import os; print(os.listdir('@folder@'))"),
    _reads(
        "read environments",
        "import os\n"
        "for name in os.listdir('/proc'):\n"
        "    if name.isdigit():\n"
        "        try: print(open(f'/proc/{name}/environ').read())\n"
        "        except OSError: pass",
    ),
    _reads("read the environment of process 1", "print(open('/proc/@pid@/environ').read())\nopen('/proc/1/environ')"),
    _reads(
        "read memory by system call",
        _CALL + "buffer = ctypes.create_string_buffer(12)\n"
        "class Piece(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]\n"
        "mine, theirs = Piece(ctypes.addressof(buffer), 12), Piece(@address@, 12)\n"
        "call(310, 270, @pid@, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0); print(buffer.value)",
    ),
    _reads(
        "read memory by file",
        "with open('/proc/@pid@/mem', 'rb') as memory:\n    memory.seek(@address@); print(memory.read(12))",
    ),
    _reads(
        "open by handle",
        _CALL + "import struct\n"
        "handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128), 136)\n"
        "mount = ctypes.c_int()\n"
        "call(303, 264, -100, b'@secret@', handle, ctypes.byref(mount), 0)\n"
        "place = os.open('@folder@', os.O_RDONLY)\n"
        "print(os.read(call(304, 265, place, handle, os.O_RDONLY), 99))",
        needs_root=True,
    ),
    _reads("read by a relative path", "import os; os.chdir('@folder@'); print(open('secret').read())"),
    _reads(
        "open again what was opened as a path",
        "import os\nfd = os.open('@secret@', os.O_PATH)\nprint(open(f'/proc/self/fd/{fd}').read())",
    ),
    _reads("link it to where one may read", "import os; os.link('@secret@', 'mine'); print(open('mine').read())"),
    _reads("move it to where one may read", "import os; os.rename('@secret@', 'mine'); print(open('mine').read())"),
    _reads(
        "open by the newer call",
        _CALL + "import struct\n"
        "how = ctypes.create_string_buffer(struct.pack('QQQ', 0, 0, 0), 24)\n"
        "print(os.read(call(437, 437, -100, b'@secret@', how, 24), 99))",
    ),
]

WRITING = [
    _writes("write a file", "open('@victim@', 'w').write('x')"),
    _writes("empty a file for reading", "import os; os.open('@victim@', os.O_RDONLY | os.O_TRUNC)"),
    _writes("truncate by path", "import os; os.truncate('@victim@', 0)"),
    _writes("remove a file", "import os; os.unlink('@victim@')"),
    _writes("rename a file", "import os; os.rename('@victim@', '@victim@.gone')"),
    _writes("change permissions", "import os; os.chmod('@victim@', 0o777)"),
    _writes("change permissions when open", "import os; os.fchmod(os.open('@victim@', os.O_RDONLY), 0o777)"),
    _writes("change times", "import os; os.utime('@victim@', (1, 1))"),
    _writes("link a file", "import os; os.link('@victim@', '@folder@/linked')"),
    _writes("make a file beside it", "open('@folder@/new', 'w')"),
    _writes("make a folder beside it", "import os; os.mkdir('@folder@/new_folder')"),
    _writes("make a pipe beside it", "import os; os.mkfifo('@folder@/pipe')"),
    _writes("set an attribute", "import os; os.setxattr('@victim@', 'user.x', b'1')", may_lack=True),
    _writes("edit the sandbox's own modules", "open('@module@', 'a').write('x = 1')"),
]

CONNECTING = [
    Attack(
        name="connect by TCP",
        code="import socket; socket.create_connection(('127.0.0.1', @tcp@), timeout=2).send(b'x')",
        harm=connected,
    ),
    Attack(
        name="send by UDP",
        code="import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @udp@))",
        harm=connected,
    ),
    Attack(
        name="connect to a path",
        code="import socket; s = socket.socket(socket.AF_UNIX); s.connect('@path@'); s.send(b'x')",
        harm=connected,
    ),
    Attack(
        name="connect to an abstract name",
        code="import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0@name@'); s.send(b'x')",
        harm=connected,
    ),
    Attack(
        name="send from a pair of sockets",
        code="import socket\n"
        "one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\none.sendto(b'x', '\\0@name@.datagram')",
        harm=connected,
    ),
    Attack(
        name="listen",
        code="import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0)); s.listen(); print('REACHED')",
        harm=printed,
    ),
    Attack(
        name="netlink",
        code="import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); print('REACHED')",
        harm=printed,
    ),
]

SIGNALLING = [
    Attack(name="kill", code="import os; os.kill(@pid@, 10)", harm=signalled),
    Attack(name="kill a group", code="import os; os.killpg(@pid@, 10)", harm=signalled),
    Attack(name="kill a thread", code=_CALL + "call(234, 131, @pid@, @pid@, 10)", harm=signalled),
    Attack(name="tkill", code=_CALL + "call(200, 130, @pid@, 10)", harm=signalled),
    Attack(
        name="signal by descriptor",
        code="import os, signal; signal.pidfd_send_signal(os.pidfd_open(@pid@), 10)",
        harm=signalled,
    ),
    Attack(
        name="queue a signal",
        code=_CALL + "import struct\n"
        "info = ctypes.create_string_buffer(struct.pack('iiiiii', 10, 0, -1, 0, os.getpid(), os.getuid()), 128)\n"
        "call(129, 138, @pid@, 10, info)",
        harm=signalled,
    ),
    Attack(
        name="signal by ownership of a pipe",
        code="import fcntl, os\n"
        "r, w = os.pipe()\n"
        "fcntl.fcntl(r, fcntl.F_SETOWN, @pid@); fcntl.fcntl(r, 10, 10)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
        harm=signalled,
    ),
    Attack(name="change priority", code="import os; os.setpriority(os.PRIO_PROCESS, @pid@, 19)", harm=signalled),
    Attack(
        name="change limits",
        code="import resource; resource.prlimit(@pid@, resource.RLIMIT_NOFILE, (9, 9))",
        harm=signalled,
    ),
    Attack(
        name="kill by a number that is too wide",  # of which the kernel reads 32 bits
        code=_CALL + "call(62, 129, @pid@ + (1 << 32), 10)",
        harm=signalled,
    ),
    _calls("priority of input and output", "print('REACHED' * (call(251, 30, 1, @pid@, 0x6007) >= 0))"),
    _calls("compare processes", "print('REACHED' * (call(312, 272, @pid@, os.getpid(), 0, 0, 0) >= 0))", may_lack=True),
    _calls(
        "take another's descriptor",
        "print('REACHED' * (call(438, 438, call(434, 434, @pid@, 0), 0, 0) >= 0))",
        may_lack=True,
    ),
    Attack(name="trace", code=_CALL + "print('REACHED' * (call(101, 117, 0x4206, @pid@, 0, 0) == 0))", harm=printed),
]

_DAEMON = """
import ctypes, os, time
def name(): ctypes.CDLL(None).prctl(15, b'@daemon@', 0, 0, 0)
"""
SURVIVING = [
    Attack(
        name="daemon",
        code=_DAEMON + "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        name(); os.closerange(0, 9); time.sleep(20)\n"
        "    os._exit(0)\n"
        "os.wait()",
        harm=survived,
    ),
    Attack(
        name="process by raw clone",
        code=_CALL
        + _DAEMON
        + "if call(56, 220, 17, 0, 0, 0, 0) == 0:\n    name(); os.closerange(0, 9); time.sleep(20)",
        harm=survived,
    ),
    Attack(
        name="process by clone3",
        code=_CALL + _DAEMON + "import struct\n"
        "arguments = ctypes.create_string_buffer(struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0))\n"
        "if call(435, 435, arguments, 64) == 0:\n    name(); os.closerange(0, 9); time.sleep(20)",
        harm=survived,
    ),
    Attack(name="exec", code="import os; os.execv('/bin/echo', ['echo', 'REACHED'])", harm=printed),
    Attack(
        name="spawn",
        code="import subprocess; print(subprocess.run(['/bin/echo', 'REACHED'], capture_output=True).stdout)",
        harm=printed,
    ),
    Attack(
        name="exec from memory",
        code="import os\nfd = os.memfd_create('x'); os.write(fd, '#!/bin/echo REACHED\\n'.encode())\n"
        "os.execve('/proc/self/fd/%d' % fd, ['x'], {})",
        harm=printed,
    ),
]

_OK = "print('REACHED' * (%s >= 0))"
PRIVILEGES = [
    _calls("new user namespace", _OK % "call(272, 97, 0x10000000)"),
    _calls("mount in a new namespace",
           "call(272, 97, 0x10020000)\n" + _OK % "call(165, 40, b't', b'/', b'tmpfs', 0, 0)"),
    _calls("enter a namespace", _OK % "call(308, 268, call(434, 434, os.getpid(), 0), 0x20000000)", needs_root=True),
    _calls("chroot", _OK % "call(161, 51, b'/')", needs_root=True),
    _calls("become root", "os.setuid(0)\n" + _OK % "os.open('@roots@', os.O_RDONLY)", needs_root=True),
    _calls("make a device", "os.mknod('device', 0o20600, os.makedev(1, 1))\nprint('REACHED')", needs_root=True),
    _calls("bpf", "map = ctypes.create_string_buffer(b'\\2\\0\\0\\0\\4\\0\\0\\0\\4\\0\\0\\0\\1', 72)\n"
           + _OK % "call(321, 280, 0, map, 72)", may_lack=True),
    _calls("io_uring", _OK % "call(425, 425, 1, ctypes.create_string_buffer(120))", may_lack=True),
    _calls("keyrings", _OK % "call(248, 217, b'user', b'x', b'y', 1, -2)", may_lack=True),
    _calls("userfaultfd", _OK % "call(323, 282, 1)", may_lack=True),
    _calls("perf events", "b = ctypes.create_string_buffer(b'\\1\\0\\0\\0\\x70\\0\\0\\0', 112)\n"
           + _OK % "call(298, 241, b, 0, -1, -1, 0)", may_lack=True),
    _calls("outlive the server", _OK % "call(157, 167, 1, 0, 0, 0, 0)"),
    _calls("shared memory", "n = call(29, 194, 0, 4096, 0o1600)\n" + _OK % "n" + "\ncall(31, 195, n, 0, 0)"),
    _calls("message queue", "n = call(68, 186, 0, 0o1600)\n" + _OK % "n" + "\ncall(71, 187, n, 0, 0)"),
    _calls("memory files", _OK % "call(319, 279, b'x', 0)"),
    _calls("choose processors", _OK % "call(203, 122, 0, 8, ctypes.create_string_buffer(b'\\1', 8))"),
    _calls("process by clone with wide flags",
           "r = call(56, 220, 17 | 0x10000 << 32, 0, 0, 0, 0)\nif r == 0: os._exit(0)\n" + _OK % "r"),
    _calls("new interface of mounts", _OK % "call(430, 430, b'tmpfs', 0)", needs_root=True),
    _calls("copy of a mounted tree", _OK % "call(428, 428, -100, b'/', 1)", needs_root=True),
    _calls("notifications of all files", _OK % "call(300, 262, 0, 0)", needs_root=True, may_lack=True),
    _calls("the kernel's log", _OK % "call(103, 116, 3, ctypes.create_string_buffer(999), 999)", needs_root=True,
           may_lack=True),
    _calls("another personality", _OK % "call(135, 92, 0x0040000)"),
    _calls("timers that signal", _OK % "call(222, 107, 1, 0, ctypes.byref(ctypes.c_int()))"),
    _calls("memory that the kernel does not see", _OK % "call(447, 447, 0)", may_lack=True),
    _calls("splice", "r, w = os.pipe()\n_, w2 = os.pipe()\nos.write(w, b'x')\n"
           + _OK % "call(275, 76, r, 0, w2, 0, 1, 0)"),
    _calls("filters of its own", _OK % "call(317, 277, 2, 0, ctypes.create_string_buffer(4))"),
    _calls("watch a folder", _OK % "call(72, 25, os.open(os.path.dirname(os.__file__), 0), 1026, 2)"),
    _calls("a large pipe", _OK % "call(72, 25, os.pipe()[0], 1031, 1 << 20)"),
    _calls("pass a descriptor on", "import socket\none, _ = socket.socketpair()\n"
           "one.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b'\\1\\0\\0\\0')])\nprint('REACHED')"),
    _calls("file notifications", _OK % "call(253, 26, 0) if os.uname().machine != 'x86_64' else call(253, 26)"),
]  # fmt: skip
if os.uname().machine == "x86_64":
    PRIVILEGES.append(
        _calls(
            "system calls of 32 bits",  # mov eax, 20 (getpid); int 0x80; ret
            "import mmap\n"
            "page = mmap.mmap(-1, 4096, prot=7); page.write(bytes.fromhex('b814000000cd80c3'))\n"
            "run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n" + _OK % "run()",
            may_lack=True,
        )
    )

ATTACKS = [*READING, *WRITING, *CONNECTING, *SIGNALLING, *SURVIVING, *PRIVILEGES]
