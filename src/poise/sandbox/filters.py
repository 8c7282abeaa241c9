"""Walls that need no namespace: a seccomp filter of system calls, and Landlock for files (Linux, x86_64 and aarch64).

https://docs.kernel.org/userspace-api/seccomp_filter.html, https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import errno
import functools
import os
import stat
import struct
from collections.abc import Iterable

from poise.sandbox.syscalls import (
    ALLOWED,
    ALLOWED_IN_JAIL,
    CLONE,
    CLONE_CONDITIONS,
    CONDITIONAL,
    FIRST_NEW,
    SIGNALS,
    Conditions,
    Numbers,
)

_libc = ctypes.CDLL(None, use_errno=True)
_PR_GET_SECCOMP, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 21, 22, 2
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # classic BPF
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MACHINE = os.uname().machine

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ = 0b1101  # execute, read a file, list a directory
_LIST = 0b1000
_ON_FILES = 0b1100000000000111  # the rights that a single file can have
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of rights by version of the interface; later ones as 5


class FilterError(OSError):
    """The kernel refuses a filter. The message names the call."""


def has_seccomp() -> bool:
    return _MACHINE in _AUDIT_ARCH and _libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def landlock_version() -> int:
    """0 where the kernel has no Landlock."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def filter_system_calls(*, is_jailed: bool, allows_threads: bool) -> None:
    """From here on, this process makes only the system calls of ``syscalls``. Needs no_new_privs."""
    program = filter_program(_MACHINE, pid=os.getpid(), is_jailed=is_jailed, allows_threads=allows_threads)
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "prctl(PR_SET_SECCOMP)")


def filter_program(machine: str, *, pid: int, is_jailed: bool, allows_threads: bool) -> bytes:
    """The filter as classic BPF. ``pid``: the only process that may get signals."""
    column = list(_AUDIT_ARCH).index(machine)
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),  # 32-bit calls
        (_LOAD, 0, 0, _NUMBER),
    ]
    for numbers in SIGNALS.values():
        program += _conditional(numbers[column], ((0, 0xFFFFFFFF, (pid,)),))
    return _packed(program) + _fixed_part(machine, is_jailed=is_jailed, allows_threads=allows_threads)


@functools.cache
def _fixed_part(machine: str, *, is_jailed: bool, allows_threads: bool) -> bytes:
    column = list(_AUDIT_ARCH).index(machine)
    program: list[tuple[int, int, int, int]] = []
    for numbers, conditions in CONDITIONAL.values():
        program += _conditional(numbers[column], conditions)
    if allows_threads:
        program += _conditional(CLONE[column], CLONE_CONDITIONS)
    allowed: dict[str, Numbers] = ALLOWED | (ALLOWED_IN_JAIL if is_jailed else {})
    for numbers in allowed.values():
        number = numbers[column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    program += [
        (_AT_LEAST, 1, 0, FIRST_NEW),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        # clone3 among them: its flags are out of a filter's sight, and the C library then uses clone.
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    return _packed(program)


def _conditional(number: int | None, conditions: Conditions) -> list[tuple[int, int, int, int]]:
    """Allows ``number`` where all ``conditions`` hold, refuses it where not, lets other calls pass on."""
    if number is None:
        return []
    block = []
    for half, mask, values in conditions:
        block += [(_LOAD, 0, 0, _ARGUMENTS + 4 * half), (_AND, 0, 0, mask)]
        block += [(_EQUAL, len(values) - k, 0, value) for k, value in enumerate(values)]
        block.append((_RETURN, 0, 0, _FAIL | errno.EPERM))
    return [(_EQUAL, 0, len(block) + 1, number), *block, (_RETURN, 0, 0, _ALLOW)]


def _packed(program: Iterable[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("HBBI", *line) for line in program)


def hide_files(*, readable: Iterable[str], listable: Iterable[str], writable: Iterable[str]) -> None:
    """From here on, this process opens nothing but these paths and what is below them. Needs no_new_privs.

    ``listable``: folders whose names, and those of the folders inside, may be read, but no files.
    """
    version = landlock_version()
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    # Rights on files; TCP bind and connect (version 4); abstract sockets and signals to processes outside (version 6).
    attributes = struct.pack("QQQ", rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(ruleset, "landlock_create_ruleset")
    for paths, allowed in ((readable, _READ), (listable, _LIST), (writable, rights)):
        for path in paths:
            try:
                fd = os.open(path, os.O_PATH)
            except FileNotFoundError:
                continue
            limited = allowed & rights if stat.S_ISDIR(os.fstat(fd).st_mode) else allowed & rights & _ON_FILES
            rule = struct.pack("=Qi", limited, fd)
            _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule({path})")
            os.close(fd)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise FilterError(number, f"{call}: {os.strerror(number)}")
