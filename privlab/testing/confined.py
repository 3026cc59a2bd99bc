"""Confinement of a process by Linux itself: Landlock takes its files, seccomp its network and all other processes.

Both are system calls that need no rights and no program. They are made by ctypes: the packages `landlock` (pre-releases
alone) and `pyseccomp` (which needs a library of the system) are not kept up.
"""

import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The system calls of Landlock, which have the same numbers on every machine."""

_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
"""The rights of Landlock that are given to what may be read."""

_ENDS_WITH_PARENT, _NO_NEW_PRIVILEGES, _GET_SECCOMP, _SET_SECCOMP, _FILTER = 1, 38, 21, 22, 2
"""Options of the system call prctl."""

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The machines whose system calls are known, and how a filter of seccomp sees them."""

_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # read files, which Landlock or bubblewrap chooses, and write to what is open
    **{"read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "write": (1, 64), "writev": (20, 66)},
    **{"close": (3, 57), "lseek": (8, 62), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24)},
    **{"stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291)},
    **{"access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "fadvise64": (221, 223)},
    **{"getdents64": (217, 61), "getcwd": (79, 17)},
    **{"readlink": (89, None), "readlinkat": (267, 78)},
    **{"poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72)},
    # memory
    **{"mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233)},
    **{"brk": (12, 214), "get_mempolicy": (239, 236), "membarrier": (324, 283), "futex": (202, 98)},
    # this process: its signals, its end, its limits, and the system
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132)},
    **{"restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94), "sched_yield": (24, 124)},
    **{"set_robust_list": (273, 99), "rseq": (334, 293), "getcpu": (309, 168), "getrlimit": (97, 163)},
    **{"getrusage": (98, 165), "times": (100, 153), "uname": (63, 160), "time": (201, None)},
    **{"gettimeofday": (96, 169), "nanosleep": (35, 101), "getrandom": (318, 278)},
    **{"getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177)},
}
"""The system calls that are allowed, with their numbers on the machines above; None where there is no such call."""

_WRITING, _ANY, _CLOCK_OF_PROCESS, _WITH_OTHERS = 0o1103, 0xFFFFFFFF, 1 << 31, 0o2070
"""Bits of arguments: to open for writing or create; of a process; of its clock; what fcntl has in common with others.

These are who gets the signals of a file, what others do with it (leases and notices), and locks that a file keeps.
"""

_ALLOWED_WITHOUT: dict[str, tuple[tuple[int | None, int | None], int, int]] = {
    "open": ((2, None), 1, _WRITING),
    "openat": ((257, 56), 2, _WRITING),
    "fcntl": ((72, 25), 1, _WITH_OTHERS),
    "prlimit64": ((302, 261), 0, _ANY),
    "sched_getaffinity": ((204, 123), 0, _ANY),
    "clock_gettime": ((228, 113), 0, _CLOCK_OF_PROCESS),
    "clock_getres": ((229, 114), 0, _CLOCK_OF_PROCESS),
    "clock_nanosleep": ((230, 115), 0, _CLOCK_OF_PROCESS),
}
"""The system calls that are allowed if an argument has none of some bits: their numbers, which argument, the bits."""

_ANSWERED_WITH_ZERO: dict[str, tuple[int | None, int | None]] = {
    **{"getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173)},
}
"""The system calls that return zero: the number of a process would say how many calls there were before."""


@cache
def landlock_version() -> int:
    """Return the version of Landlock that the kernel offers; 0 if it offers none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


@cache
def has_seccomp() -> bool:
    """Return whether the kernel offers filters of seccomp, and the numbers of its system calls are known."""
    known = sys.platform == "linux" and platform.machine() in _MACHINES and sys.maxsize > 2**32
    return known and ctypes.CDLL(None).prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0


def end_with(parent: int) -> None:
    """Let this process end with its parent, on Linux, also where the parent ended before this was asked for."""
    if sys.platform == "linux":
        _check(ctypes.CDLL(None, use_errno=True).prctl(_ENDS_WITH_PARENT, signal.SIGKILL, 0, 0, 0))
        if os.getppid() != parent:
            os._exit(1)


def confine(readable: Sequence[str]) -> None:
    """Take from this process, for good, what the kernel can take: all files but some, the network, other processes.

    Rights of root are given up as well. What the kernel does not offer is left out: see `landlock_version` and
    `has_seccomp`. `readable` are the files and folders that may be read; those that do not exist are skipped.

    Raises:
        OSError: if the kernel offers something and then refuses it.
    """
    if not (landlock_version() or has_seccomp()):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    if landlock_version():
        _restrict_files(libc, readable)
    version_3, no_rights = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(libc.capset(version_3, no_rights))
    if has_seccomp():
        code = b"".join(_filter(platform.machine()))
        program = ctypes.create_string_buffer(code, len(code))
        # struct sock_fprog: the number of instructions, of 8 bytes each, and where they are
        _check(libc.prctl(_SET_SECCOMP, _FILTER, struct.pack("@HP", len(code) // 8, ctypes.addressof(program))))


def _check(returned: int) -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), f"cannot be confined: {os.strerror(ctypes.get_errno())}")
    return returned


def _restrict_files(libc: ctypes.CDLL, readable: Sequence[str]) -> None:
    """Restrict this process to reading files by Landlock: it can neither write, nor trace a process outside."""
    version = landlock_version()
    # the rights that each version knows: 13 of files, then to move and link, to truncate, and to control devices
    files = (1 << (13 + sum(version >= least for least in (2, 3, 5)))) - 1
    tcp, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)  # of TCP, sockets without a file, and signals
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _check(libc.syscall(_CREATE_RULESET, struct.pack("=QQQ", files, tcp, scopes), ctypes.c_size_t(size), 0))
    for path in readable:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights = _READ_FILE | (_READ_FOLDER if Path(path).is_dir() else 0)
        _check(libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, opened), 0))
        os.close(opened)
    _check(libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _filter(machine: str) -> list[bytes]:
    """Return the instructions of a filter of system calls for a machine, as the kernel reads them (struct sock_filter).

    The filter reads struct seccomp_data: the number of the call at byte 0, the machine at 4, arguments from 16 on, of 8
    bytes each. What it does not name, it answers with ENOSYS, as an older kernel would.
    """
    load, jump_if_equal, jump_if_bits, answer = 0x20, 0x15, 0x45, 0x06
    allowed, zero, not_permitted, not_there, killed = 0x7FFF0000, 0x00050000, 0x00050001, 0x00050026, 0x80000000

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    code = [
        instruction(load, 4),
        instruction(jump_if_equal, _MACHINES[machine], if_true=1),
        instruction(answer, killed),
        instruction(load, 0),
    ]
    column = [*_MACHINES].index(machine)
    for numbers, argument, bits in _ALLOWED_WITHOUT.values():
        if (number := numbers[column]) is not None:
            code += [
                instruction(jump_if_equal, number, if_false=4),
                instruction(load, 16 + 8 * argument),
                instruction(jump_if_bits, bits, if_false=1),
                instruction(answer, not_permitted),
                instruction(answer, allowed),
            ]
    for calls, returned in ((_ALLOWED, allowed), (_ANSWERED_WITH_ZERO, zero)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                code += [instruction(jump_if_equal, number, if_false=1), instruction(answer, returned)]
    return [*code, instruction(answer, not_there)]
