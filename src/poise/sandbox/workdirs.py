"""Working directories on disk, where no private file system can be had: their size, their removal; a user's tasks."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator

MAX_ENTRIES = 4096  # files and folders of one working directory
MAX_DEPTH = 64  # folders in folders
_COUNT_S = 1.0  # how long a count of tasks is good
_counted: dict[int, tuple[float, int]] = {}


def is_too_large(folder: str, file_mib: int) -> bool:
    """Whether more than ``file_mib`` or ``MAX_ENTRIES`` lie in it, or it is nested more than ``MAX_DEPTH`` deep."""
    num_bytes, deepest = 0, folder.count("/") + MAX_DEPTH
    with contextlib.suppress(FileNotFoundError):  # the interpreter goes on while we look
        for count, entry in enumerate(_entries(folder)):
            num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
            if count >= MAX_ENTRIES or num_bytes > file_mib << 20 or entry.path.count("/") > deepest:
                return True
    return False


def _entries(folder: str) -> Iterator["os.DirEntry[str]"]:
    folders = [folder]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except PermissionError:  # closed by the interpreter: then it cannot write there either
            continue
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)


def remove(folder: str) -> None:
    """Removes it with everything inside, however deep it is and whatever its permissions are.

    Folders inside are moved up before they are emptied: no path grows long, nothing recurses.
    """
    doomed, count = [folder], 0
    while doomed:
        current = doomed.pop()
        os.chmod(current, 0o700)
        for entry in list(os.scandir(current)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                count += 1
                moved = f"{folder}.{count}"
                os.rename(entry.path, moved)
                doomed.append(moved)
            else:
                os.unlink(entry.path)
        os.rmdir(current)


def remove_all(base: str) -> None:
    """Removes ``base`` and the working directories in it."""
    if not os.path.isdir(base):
        return
    for entry in list(os.scandir(base)):
        remove(entry.path)
    shutil.rmtree(base)


def count_tasks(uid: int) -> int:
    """Processes and threads of a user, as the kernel counts them for RLIMIT_NPROC; at most a second old."""
    counted_at, count = _counted.get(uid, (-_COUNT_S, 0))
    if time.monotonic() - counted_at < _COUNT_S:
        return count
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
    _counted[uid] = (time.monotonic(), count)
    return count
