"""Kernel walls around a snippet: namespaces, a private read-only root, resource limits, dropped rights.

Linux system calls through ctypes, no dependency. Runs inside the fork server only, never in the process that trains.
"""

import ctypes
import mmap
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

WORK = "/snippet"  # the snippet's own empty directory, inside the private root

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_CAP_CHOWN, _CAP_KILL, _CAP_SETGID, _CAP_SETUID = 0, 5, 6, 7
MAX_FILES = 64  # open at once
_FIRST_SPARE_UID = 2_000_000_000  # far from real users; one for each snippet, so that process limits count per snippet

_libc = ctypes.CDLL(None, use_errno=True)


class JailError(OSError):
    """The kernel refuses a wall. The message names the call."""


def enter_namespaces(readable: Sequence[str], hidden: Sequence[str]) -> None:
    """Forks into new mount, network, process, IPC and host-name namespaces with a private read-only root.

    Returns in the child, which is process 1 of its namespace: when it ends, the kernel ends everything inside. Without
    root rights the namespaces belong to a new user namespace. ``readable``: what the new root shows; of ``hidden``
    folders, which are below those, only what is readable itself. Raises ``JailError`` where the kernel allows none of
    it.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    if uid == 0:  # a user namespace would not help root: the kernel does not limit the number of root's processes
        _unshare(flags)
    else:
        _unshare(flags | _CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    _build_root(readable, hidden)


def next_child_in_new_namespace() -> None:
    """The next child becomes process 1 of its own process namespace: there it can name nobody else."""
    _unshare(_CLONE_NEWPID)


def next_child_in(namespace: int) -> None:
    """Takes ``next_child_in_new_namespace`` back. ``namespace``: a process descriptor of the caller."""
    _check(_libc.setns(namespace, _CLONE_NEWPID), "setns")


def mount_work_dir(size_mib: int) -> None:
    """An empty memory-backed ``WORK`` of at most ``size_mib``, in a mount namespace of the caller's own."""
    _unshare(_CLONE_NEWNS)
    _mount("tmpfs", WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size_mib}m,nr_inodes=4096,mode=777")


def spare_uid() -> int:
    """A user that nothing else on this machine runs as."""
    return _FIRST_SPARE_UID + int.from_bytes(os.urandom(3), "big")


def can_switch_user(readable: Sequence[str]) -> bool:
    """Whether an interpreter can run as a spare user and still reach ``readable`` (without a private root)."""
    if os.geteuid() != 0 or not _has_capabilities(_CAP_CHOWN, _CAP_SETGID, _CAP_SETUID, _CAP_KILL):
        return False
    folders = {str(parent) for path in readable for parent in Path(path).parents}
    return all(os.stat(folder).st_mode & 0o001 for folder in folders if os.path.isdir(folder))


def limit_resources(*, memory_mib: int, file_mib: int, num_tasks: int | None) -> None:
    """Sets the limits of the calling process. ``num_tasks``: of its user, None for no limit."""
    wanted = {
        "RLIMIT_AS": memory_mib << 20,
        "RLIMIT_FSIZE": file_mib << 20,
        "RLIMIT_NPROC": num_tasks,
        "RLIMIT_NOFILE": MAX_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    for name, value in wanted.items():
        if value is None or (sys.platform != "linux" and name in ("RLIMIT_AS", "RLIMIT_MSGQUEUE")):
            continue  # other systems have neither limit
        resource.setrlimit(getattr(resource, name), (value, value))


def drop_rights(uid: int | None, *, is_jailed: bool) -> None:
    """Becomes ``uid``, without capabilities or a way to gain any.

    ``uid`` None: the user stays; in a jail that means a user namespace without any user mapped, which also counts its
    processes apart.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif is_jailed:
        _unshare(_CLONE_NEWUSER)
    _drop_capabilities()
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    die_with_parent()


def mapped_mib() -> int:
    """Address space of the calling process, rounded up. Needs no /proc: finds the limit below which nothing maps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle << 20, hard))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
            high = middle
        except OSError:
            low = middle + 1
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return low


def die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def _build_root(readable: Sequence[str], hidden: Sequence[str]) -> None:
    """A new root that holds ``readable``, read-only, and nothing else."""
    inside = [path for path in readable if any(path.startswith(folder + "/") for folder in hidden)]
    sources = {path: os.path.realpath(path) for path in readable}
    links = {path: os.readlink(path) for path in readable if os.path.islink(path) and path.startswith("/lib")}
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    pivot_root = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if pivot_root is None:
        raise JailError(f"pivot_root: unknown machine {os.uname().machine}")
    _check(_libc.syscall(pivot_root, b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    for path, target in links.items():
        os.symlink(target, path)
    for path in [path for path in readable if path not in inside]:
        _show(path, "/old" + sources[path])
    for folder in hidden:
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in inside:
        _show(path, "/old" + sources[path])
    for folder in hidden:
        _mount(None, folder, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _check(_libc.umount2(b"/old", _MNT_DETACH), "umount2(/old)")
    os.rmdir("/old")
    os.mkdir(WORK)
    if not os.path.lexists("/tmp"):
        os.symlink(WORK, "/tmp")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _show(path: str, old: str) -> None:
    """Makes ``old`` visible as ``path``, read-only."""
    if os.path.lexists(path) or not os.path.exists(old):
        return  # already inside a folder that is shown, or not on this system
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(old, path, None, _MS_BIND | _MS_REC)
    locked = os.statvfs(path).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    nodev = 0 if path.startswith("/dev/") else _MS_NODEV
    _mount(None, path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | nodev | locked)


def _has_capabilities(*numbers: int) -> bool:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same for the numbers above 31
    _check(_libc.capget(header, sets), "capget")
    return all(sets[0] & 1 << number for number in numbers)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)  # this process
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3])
    _check(result, f"mount({target})")


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise JailError(number, f"{call}: {os.strerror(number)}")
