"""Walls that need no namespace: a seccomp filter of system calls, and Landlock for files (Linux, x86_64 and aarch64).

https://docs.kernel.org/userspace-api/seccomp_filter.html, https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_PR_GET_SECCOMP, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 21, 22, 2
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # classic BPF
_NUMBER, _ARCH, _ARGUMENT0 = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
_X32 = 0x40000000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MACHINE = os.uname().machine
# Never needed by a snippet, and the ways by which such walls were broken in the past: (x86_64, aarch64).
_DENIED = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "init_module": (175, 105),
    "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142), "swapon": (167, 224),
    "io_uring_setup": (425, 425), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
}  # fmt: skip
# Without namespaces also: what makes processes, what reaches the network and other processes (0x3FFF: no such call).
_DENIED_OUTSIDE = {
    "fork": (57, 0x3FFF), "vfork": (58, 0x3FFF), "socket": (41, 198), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "prlimit64": (302, 261), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
}  # fmt: skip
_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}  # allowed to the snippet itself
_CLONE, _CLONE3 = (56, 220), (435, 435)
_CLONE_THREAD = 0x10000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ = 0b1101  # execute, read a file, list a directory
_ON_FILES = 0b1100000000000111  # the rights that a single file can have
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of rights by version of the interface; later ones as 5


class FilterError(OSError):
    """The kernel refuses a filter. The message names the call."""


def has_seccomp() -> bool:
    return _MACHINE in _AUDIT_ARCH and _libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def landlock_version() -> int:
    """0 where the kernel has no Landlock."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def filter_system_calls(*, in_namespace: bool) -> None:
    """From here on, dangerous system calls of this process and its children fail with EPERM. Needs no_new_privs."""
    program = filter_program(in_namespace=in_namespace, pid=0 if in_namespace else os.getpid())
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "prctl(PR_SET_SECCOMP)")


@functools.cache
def filter_program(*, in_namespace: bool, pid: int) -> bytes:
    """The filter as classic BPF. ``pid``: the only process that may get signals, where it isn't in a namespace."""
    column = list(_AUDIT_ARCH).index(_MACHINE)
    denied = _DENIED if in_namespace else _DENIED | _DENIED_OUTSIDE
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[_MACHINE]),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),  # its flags are out of a filter's sight; the C library then uses clone
    ]
    # Where the first argument decides: (number, test, its value, instructions skipped if it holds, and if not).
    tests = [(_CLONE[column], _ANY_BIT, _NEW_NAMESPACES, 0, 1)]
    if not in_namespace:
        tests.append((_CLONE[column], _ANY_BIT, _CLONE_THREAD, 1, 0))
        tests += [(numbers[column], _EQUAL, pid, 1, 0) for numbers in _SIGNALS.values()]
    for number, test, value, if_true, if_false in tests:
        program += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENT0),
            (test, if_true, if_false, value),
            (_RETURN, 0, 0, _FAIL | errno.EPERM),
            (_LOAD, 0, 0, _NUMBER),
        ]
    for numbers in denied.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in program)


def hide_files(*, readable: Iterable[str], writable: Iterable[str]) -> None:
    """From here on, this process opens nothing but these paths and what is below them. Needs no_new_privs."""
    version = landlock_version()
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    # Rights on files; TCP bind and connect (version 4); abstract sockets and signals to processes outside (version 6).
    attributes = struct.pack("QQQ", rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(ruleset, "landlock_create_ruleset")
    for paths, allowed in ((readable, _READ), (writable, rights)):
        for path in paths:
            if not os.path.exists(path):
                continue
            fd = os.open(path, os.O_PATH)
            limited = allowed & rights if os.path.isdir(path) else allowed & rights & _ON_FILES
            rule = struct.pack("=Qi", limited, fd)
            _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule({path})")
            os.close(fd)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise FilterError(number, f"{call}: {os.strerror(number)}")
