"""Which system calls an interpreter may make, by number on (x86_64, aarch64); None: that machine has no such call.

What is not here fails. The numbers are the kernel's: arch/x86/entry/syscalls/syscall_64.tbl, and
include/uapi/asm-generic/unistd.h for aarch64.
"""

Numbers = tuple[int | None, int | None]

ALLOWED: dict[str, Numbers] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "msync": (26, 227),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71),
    "recvfrom": (45, 207), "shutdown": (48, 210), "exit": (60, 93), "uname": (63, 160), "flock": (73, 32),
    "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None),
    "unlink": (87, None), "symlink": (88, None), "readlink": (89, None), "umask": (95, 166),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "getpgrp": (111, None), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "statfs": (137, 43),
    "fstatfs": (138, 44), "getpriority": (140, 141), "arch_prctl": (158, None), "gettid": (186, 178),
    "futex": (202, 98), "sched_getaffinity": (204, 123), "epoll_create": (213, None), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "fadvise64": (221, 223),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "epoll_wait": (232, None), "epoll_ctl": (233, 21), "mkdirat": (258, 34), "newfstatat": (262, 79),
    "unlinkat": (263, 35), "renameat": (264, 38), "symlinkat": (266, 36), "readlinkat": (267, 78),
    "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99),
    "epoll_pwait": (281, 22), "timerfd_create": (283, 85), "eventfd": (284, None), "fallocate": (285, 47),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "eventfd2": (290, 19), "epoll_create1": (291, 20),
    "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69), "pwritev": (296, 70), "getcpu": (309, 168),
    "renameat2": (316, 276), "getrandom": (318, 278), "copy_file_range": (326, 285), "preadv2": (327, 286),
    "pwritev2": (328, 287), "statx": (332, 291), "rseq": (334, 293), "close_range": (436, 436),
    "faccessat2": (439, 439),
}  # fmt: skip
# Change what a file is without opening it for writing. Landlock does not see them, a read-only root does.
ALLOWED_IN_JAIL: dict[str, Numbers] = {
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "utime": (132, None), "utimes": (235, None),
    "fchmodat": (268, 53), "utimensat": (280, 88),
}  # fmt: skip

_ANY = 0xFFFFFFFF
_CLONE_THREAD, _NEW_NAMESPACES = 0x10000, 0x7E020080  # every CLONE_NEW* flag
_TRUNCATE, _ACCESS_MODE = 0x200, 0x3
# (argument, mask, values): allowed where ``argument & mask`` is one of the values, for each triple. Arguments count
# from 0 in halves of 32 bits: 2 * i is the low half of argument i.
Conditions = tuple[tuple[int, int, tuple[int, ...]], ...]
_ACCESS_AND_TRUNCATE = tuple(mode | cut for mode in range(4) for cut in (0, _TRUNCATE) if (mode, cut) != (0, _TRUNCATE))
CONDITIONAL: dict[str, tuple[Numbers, Conditions]] = {
    # O_TRUNC without write access would empty files that may only be read.
    "open": ((2, None), ((2, _ACCESS_MODE | _TRUNCATE, _ACCESS_AND_TRUNCATE),)),
    "openat": ((257, 56), ((4, _ACCESS_MODE | _TRUNCATE, _ACCESS_AND_TRUNCATE),)),
    # Duplicates, flags and locks; not F_SETOWN and F_SETSIG, which send signals to others, nor leases and pipe sizes.
    "fcntl": ((72, 25), ((2, _ANY, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032, 36, 37, 38)),)),
    # TCGETS (is it a terminal), FIONBIO, FIONREAD, FIOCLEX, FIONCLEX, TIOCGWINSZ; not FIOSETOWN, SIOCSPGRP, TIOCSTI.
    "ioctl": ((16, 29), ((2, _ANY, (0x5401, 0x5421, 0x541B, 0x5451, 0x5450, 0x5413)),)),
    # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA (names of memory areas); not PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_MM.
    "prctl": ((157, 167), ((0, _ANY, (15, 16, 0x53564D41)),)),
    "prlimit64": ((302, 261), ((0, _ANY, (0,)),)),  # its own
    # What an asyncio event loop wakes itself with: a pair of connected streams (AF_UNIX, SOCK_STREAM), no address.
    "socketpair": ((53, 199), ((0, _ANY, (1,)), (2, 0xF, (1,)))),
    "sendto": ((44, 206), ((8, _ANY, (0,)), (9, _ANY, (0,)))),
}
CLONE: Numbers = (56, 220)
CLONE_CONDITIONS: Conditions = ((0, _CLONE_THREAD | _NEW_NAMESPACES, (_CLONE_THREAD,)),)  # threads, no processes
SIGNALS: dict[str, Numbers] = {"kill": (62, 129), "tgkill": (234, 131)}  # to itself
FIRST_NEW = 403  # from here on both machines number alike, and a missing call must look like one of an older kernel
