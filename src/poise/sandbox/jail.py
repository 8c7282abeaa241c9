"""Kernel walls around a snippet: namespaces, a private read-only root, resource limits, dropped rights.

Linux system calls through ctypes, no dependency. Runs inside the fork server only, never in the process that trains.
"""

import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Sequence

WORK = "/snippet"  # the snippet's own empty directory, inside the private root

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/dev/null", "/dev/zero", "/dev/urandom")
_NOBODY = 65534
_FIRST_SPARE_UID = 2_000_000_000  # far from real users; one for each snippet, so that process limits count per snippet

_libc = ctypes.CDLL(None, use_errno=True)


class JailError(OSError):
    """The kernel refuses a wall. The message names the call."""


def enter_namespaces(readable: Sequence[str]) -> None:
    """Forks into new mount, network, process, IPC and host-name namespaces with a private read-only root.

    Returns in the child, which is process 1 of its namespace: when it ends, the kernel ends everything inside. Without
    root rights the namespaces belong to a new user namespace. ``readable``: what the new root shows. Raises
    ``JailError`` where the kernel allows none of it.
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
    _build_root(readable)


def isolate_call() -> None:
    """Gives the next child its own process, mount and IPC namespaces: it sees no other snippet, leaves nothing."""
    _unshare(_CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC)


def mount_work_dir(size_mib: int, uid: int) -> None:
    """An empty memory-backed ``WORK`` of at most ``size_mib``, gone with the caller's mount namespace."""
    _mount("tmpfs", WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size_mib}m,nr_inodes=4096,mode=700,uid={uid}")


def snippet_uid() -> int:
    """The user a snippet runs as: a spare one where this process is root, else its own."""
    return _FIRST_SPARE_UID + int.from_bytes(os.urandom(3), "big") if os.geteuid() == 0 else os.geteuid()


def limit_resources(*, cpu_s: float, memory_mib: int, file_mib: int, num_processes: int) -> list[str]:
    """Sets the limits of the calling process and its children; names those that this system does not have."""
    cpu = math.ceil(cpu_s)  # the kernel counts whole seconds, and kills process 1 of a namespace only at the hard limit
    wanted = [
        ("RLIMIT_CPU", cpu, cpu),
        ("RLIMIT_AS", memory_mib << 20, memory_mib << 20),
        ("RLIMIT_FSIZE", file_mib << 20, file_mib << 20),
        ("RLIMIT_NPROC", num_processes, num_processes),
        ("RLIMIT_NOFILE", 64, 64),
        ("RLIMIT_CORE", 0, 0),
    ]
    missing = []
    for name, soft, hard in wanted:
        try:
            resource.setrlimit(getattr(resource, name), (soft, hard))
        except (AttributeError, ValueError, OSError):
            missing.append(name)
    return missing


def drop_rights(uid: int) -> None:
    """Becomes ``uid`` without capabilities or a way to gain any. A new user namespace where no root rights exist."""
    if os.geteuid() == 0:
        os.setgroups([])
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:  # a container that maps few users
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    else:
        _unshare(_CLONE_NEWUSER)  # its own count of processes; a limit set before would count the server's as well
        _drop_capabilities()
    forbid_new_rights()
    die_with_parent()


def forbid_new_rights() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def readable_paths(extra: Sequence[str]) -> list[str]:
    """What a snippet needs to see: standard library, shared libraries of the system, three devices, and ``extra``."""
    library = os.path.dirname(os.path.dirname(os.__file__))
    return sorted({library, os.path.realpath(sys.executable), *_loaded_libraries(), *extra, *_SYSTEM_PATHS})


def _build_root(readable: Sequence[str]) -> None:
    """A new root that holds ``readable``, read-only, and nothing else."""
    sources = {path: os.path.realpath(path) for path in readable}
    links = {path: os.readlink(path) for path in _SYSTEM_PATHS if os.path.islink(path)}
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
    for path, source in sources.items():
        _show(path, "/old" + source)
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


def _loaded_libraries() -> list[str]:
    with open("/proc/self/maps") as maps:
        return sorted({line.split(None, 5)[5].strip() for line in maps if ".so" in line})


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
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
