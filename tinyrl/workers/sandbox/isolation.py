"""Limits and visible paths of a sandboxed program, and the command line that gives them to launcher.py.

It sees the standard library and the shared libraries that the interpreter's own modules are linked with: no installed
package (an answer may lie in one), nothing of /proc, /etc or a home.
"""

import functools
import math
import os
import platform
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# ---- The seccomp filter of a sandbox ----
# What is not listed answers "Operation not permitted", so a call that a later kernel brings is refused as well. There
# is no `socket` and no `connect` (no network), no `kill`, `ptrace` or `setsid`, no `chmod` and no `truncate` of a path,
# no `mount`, `unshare` or `memfd_create`. `clone` makes threads only: a program cannot start another process, which is
# what makes its memory limit exact. Arguments are checked where a call can be harmful or harmless.
#
# Classic BPF, built from two tables, for the two kinds of machine whose call numbers are known here.


# Name, number on x86_64, number on aarch64 (which never had the calls with a dash).
_TABLE = """
read 0 63 write 1 64 readv 19 65 writev 20 66 pread64 17 67 pwrite64 18 68 lseek 8 62 close 3 57 close_range 436 436
open 2 - openat 257 56 stat 4 - fstat 5 80 lstat 6 - newfstatat 262 79 statx 332 291 access 21 - faccessat 269 48
faccessat2 439 439 readlink 89 - readlinkat 267 78 getdents 78 - getdents64 217 61 getcwd 79 17 chdir 80 49 fchdir 81 50
mkdir 83 - mkdirat 258 34 rmdir 84 - unlink 87 - unlinkat 263 35 rename 82 - renameat 264 38 renameat2 316 276
link 86 - linkat 265 37 symlink 88 - symlinkat 266 36 ftruncate 77 46 fallocate 285 47 fsync 74 82 fdatasync 75 83
fadvise64 221 223 sendfile 40 71 copy_file_range 326 285 flock 73 32 statfs 137 43 fstatfs 138 44 umask 95 166
dup 32 23 dup2 33 - dup3 292 24 pipe 22 - pipe2 293 59 fcntl 72 25 ioctl 16 29 eventfd2 290 19
select 23 - pselect6 270 72 poll 7 - ppoll 271 73 epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 -
epoll_pwait 281 22 socketpair 53 199 sendto 44 206 recvfrom 45 207 shutdown 48 210 getsockopt 55 209 getsockname 51 204
mmap 9 222 mprotect 10 226 munmap 11 215 mremap 25 216 madvise 28 233 msync 26 227 mincore 27 232 brk 12 214
membarrier 324 283 rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 rt_sigpending 127 136
rt_sigtimedwait 128 137 rt_sigsuspend 130 133 sigaltstack 131 132 alarm 37 - pause 34 - getitimer 36 102
setitimer 38 103 restart_syscall 219 128 nanosleep 35 101 clock_nanosleep 230 115 clock_gettime 228 113
clock_getres 229 114 gettimeofday 96 169 time 201 - times 100 153 getpid 39 172 getppid 110 173 gettid 186 178
getuid 102 174 geteuid 107 175 getgid 104 176 getegid 108 177 getgroups 115 158 getresuid 118 148 getresgid 120 150
getpgrp 111 - getpgid 121 155 getsid 124 156 uname 63 160 sysinfo 99 179 getrusage 98 165 getrlimit 97 163
prlimit64 302 261 getpriority 140 141 sched_yield 24 124 sched_getaffinity 204 123 getcpu 309 168 getrandom 318 278
clone 56 220 execve 59 221 exit 60 93 exit_group 231 94 wait4 61 260 waitid 247 95 futex 202 98 futex_waitv 449 449
set_tid_address 218 96 set_robust_list 273 99 get_robust_list 274 100 rseq 334 293 arch_prctl 158 - prctl 157 167
"""

# These must hold all together: (word of the arguments, bits that are looked at, values they may have). An argument is
# two words, the lower one first.
_ALL_BITS = 0xFFFFFFFF
_CONDITIONS = {
    "clone": [(0, 0x7E030000, (0x10000,))],  # CLONE_THREAD and no namespace
    "open": [(2, 0x203, (0, 1, 2, 0x201, 0x202))],  # O_RDONLY with O_TRUNC would empty a file it may only read
    "openat": [(4, 0x203, (0, 1, 2, 0x201, 0x202))],
    # Duplicate, the flags, locks, the size of a pipe. Not F_SETOWN and F_SETSIG: they send signals.
    "fcntl": [(2, _ALL_BITS, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032))],
    "ioctl": [(2, _ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],  # is it a terminal, how large; FIO*
    "prctl": [(0, _ALL_BITS, (15, 16, 0x53564D41))],  # names of threads and of memory, not the signal at our death
    "prlimit64": [(0, _ALL_BITS, (0,))],  # its own
    "socketpair": [(0, _ALL_BITS, (1,)), (2, 0xF, (1,))],  # AF_UNIX, SOCK_STREAM: asyncio wakes itself with one
    "sendto": [(8, _ALL_BITS, (0,)), (9, _ALL_BITS, (0,))],  # only to the other end
}
_NOT_IMPLEMENTED = {"clone3": (435, 435)}  # its flags are behind a pointer; the C library then uses clone

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # where they are in what the filter is shown
_KILL, _ALLOW, _REFUSE, _ENOSYS = 0x80000000, 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38

_Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, operand


@functools.cache
def filter_for(machine: str) -> bytes | None:
    """The filter for a machine as platform.machine() names it, or None where we do not know its numbers."""
    if machine not in _ARCHITECTURES:
        return None
    instructions: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),  # another way into the kernel, with other numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    column = list(_ARCHITECTURES).index(machine)
    words = _TABLE.split()
    for name, number in zip(words[::3], words[1 + column :: 3], strict=True):
        if number != "-":
            instructions += _allow(int(number), _CONDITIONS.get(name, []))
    for numbers in _NOT_IMPLEMENTED.values():
        instructions += [(_JUMP_IF_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ENOSYS)]
    instructions.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)


def _allow(number: int, conditions: list[tuple[int, int, tuple[int, ...]]]) -> list[_Instruction]:
    checks: list[_Instruction] = []
    for word, bits, values in conditions:
        checks += [(_LOAD, 0, 0, _ARGUMENTS + 4 * word), (_AND, 0, 0, bits)]
        checks += [(_JUMP_IF_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
        checks.append((_RETURN, 0, 0, _REFUSE))
    checks.append((_RETURN, 0, 0, _ALLOW))
    return [(_JUMP_IF_EQUAL, 0, len(checks), number), *checks]


# ---- Limits and visible paths of a program ----


LAUNCHER, HARNESS = (str(Path(__file__).with_name(name)) for name in ("launcher.py", "harness.py"))
MIN_MEMORY_BYTES = 64 << 20  # an interpreter alone needs about half
NAMESPACES = "1"  # "0" does without, as in most containers; tests see to it that the other walls hold alone
# No installed packages, no .pyc written, none of our folders on its path.
PYTHON = ("-s", "-S", "-B", "-P", "-X", "utf8")
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OPENSSL_CONF": "/dev/null", "MALLOC_ARENA_MAX": "1"}
ALSO_READABLE = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom", "/dev/zero")
SCRATCH_FOLDERS = ("/tmp", "/var/tmp", "/mnt", "/media", "/srv")  # to mount on: the first that hides nothing we need
LIST_TIMEOUT_S = 60.0
LIST_LIBRARIES = """
import contextlib, ctypes, os, sys
found = [entry.path for path in sys.path if os.path.isdir(path) for entry in os.scandir(path)]
for file in ["libgcc_s.so.1", *(path for path in found if path.endswith(".so") and "tkinter" not in path)]:
    with contextlib.suppress(OSError):
        ctypes.CDLL(file)
with open("/proc/self/maps") as maps:
    print(*{line[line.index("/"):].rstrip("\\n") for line in maps if "/" in line}, sep="\\n")
"""


class CannotIsolate(ValueError):
    """This system cannot isolate a program, so it is not run."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use. ValueError: a limit that cannot be kept."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 << 20  # address space; files in scratch come on top
    output_bytes: int = 1 << 20  # of stdout, of stderr, and of a returned value, each
    scratch_bytes: int = 16 << 20  # all files together, in memory; 0: no file can be written
    threads: int = 32

    def __post_init__(self) -> None:
        if not (math.isfinite(self.wall_s) and self.wall_s > 0):
            raise ValueError(f"Limits: wall_s must be a number of seconds above 0, not {self.wall_s}.")
        least = {"cpu_s": 1, "memory_bytes": MIN_MEMORY_BYTES, "output_bytes": 1, "scratch_bytes": 0, "threads": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise ValueError(f"Limits: {name} must be a whole number from {minimum}, not {value!r}.")


def launch_command(limits: Limits, *, harness_arguments: list[str], status: int) -> list[str]:
    """Return the command that isolates itself and becomes a sandbox's interpreter."""
    instructions = filter_for(platform.machine()) or b""
    settings = {
        "status": status,
        "parent": os.getpid(),
        "namespaces": NAMESPACES,
        "reachable": int(os.geteuid() != 0 or _anyone_can_read(interpreter(), *_needed_folders())),
        "scratch_at": _scratch_folder(),
        "seccomp": instructions.hex(),
        **vars(limits),
    }
    python = [interpreter(), *PYTHON]
    program = [*python, HARNESS, *harness_arguments]
    words = [f"{name}={value}" for name, value in settings.items()]
    return [*python, LAUNCHER, *words, "--", *program, "--", *visible_paths()]


def interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


@functools.cache
def visible_paths() -> tuple[str, ...]:
    """Return the paths that a program may look at, as launcher.py takes them."""
    library = os.path.dirname(os.__file__)
    entries = [entry.path for entry in os.scandir(library) if not entry.name.endswith("-packages")]
    command = [interpreter(), *PYTHON, "-c", LIST_LIBRARIES]
    listed = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True
    )
    linked = [path for path in listed.stdout.splitlines() if not path.startswith(library)]
    readable = {*entries, *linked, interpreter(), HARNESS, *ALSO_READABLE}
    there = sorted(path for path in readable if os.path.exists(path))
    return (f"l{library}", *(f"{'d' if os.path.isdir(path) else 'f'}{path}" for path in there), "w/dev/null")


@functools.cache
def _needed_folders() -> tuple[str, ...]:
    """Folders that a sandbox's interpreter enters on its way to what it needs."""
    return tuple(sorted({os.path.dirname(os.path.realpath(path[1:])) for path in visible_paths()}))


@functools.cache
def _scratch_folder() -> str:
    for folder in SCRATCH_FOLDERS:
        if os.path.isdir(folder) and not any(f"{needed}/".startswith(f"{folder}/") for needed in _needed_folders()):
            return folder
    return ""


@functools.cache
def _anyone_can_read(*paths: str) -> bool:
    """Whether every folder on the way lets in users who own nothing."""
    return all(above.stat().st_mode & 0o001 for path in paths for above in [Path(path), *Path(path).parents])
