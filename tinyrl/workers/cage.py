"""The cage of a sandboxed program: a script, started fresh for each run, that isolates itself and becomes the program.

    python cage.py PARENT READY JOB CPU_S MEMORY_BYTES FILE_BYTES THREADS PATH ...

JOB is an open file with the program's source. READY is a pipe: "ready\\n" before the program runs, or the walls that
are missing. A PATH that the program may look at has a letter in front: f to read a file, d a folder with all in it,
l to list a folder, w to read and write a file.

One wall for each attack. Landlock: no file but these. seccomp: no network, no other process, none started. Resource
limits: memory, processor time, threads, sizes. The kernel ends it with its parent. The program shares this process and
may do what it likes with all of it: nothing here is secret, no answer is known here, so nothing is worth forging.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import site
import struct
import sys

FILE = "program.py"  # as tracebacks name it
FIRST_USER = 2_000_000_000  # in place of root: a user that owns nothing, another one for each program
STACK_BYTES = 8 << 20
MAX_FILES = 64

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
CAP_DAC_OVERRIDE = 1 << 1
CAP_DAC_READ_SEARCH = 1 << 2
LANDLOCK_CREATE = 444
LANDLOCK_ADD = 445
LANDLOCK_RESTRICT = 446
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
TRUNCATE = 1 << 14
RIGHTS = {"f": READ_FILE, "d": READ_FILE | READ_DIR, "l": READ_DIR, "w": READ_FILE | WRITE_FILE | TRUNCATE}
RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: 1 << 13, 3: TRUNCATE, 5: 1 << 15}  # each version adds to the ones before

# ---- seccomp ----
# A call that is not listed answers "Operation not permitted", so one that a later kernel brings is refused as well.
# There is no `socket` and no `connect`, no `kill`, `ptrace`, `setsid` or `execve`, none that makes, renames, removes or
# changes a path, no `mount`, `unshare` or `memfd_create`. `clone` makes threads only: a program cannot start another
# process, which is what makes its memory limit exact. Arguments are checked where a call can be harmful or harmless.

# Name, number on x86_64, number on aarch64 (which never had the calls with a dash).
SYSTEM_CALLS = """
read 0 63 write 1 64 readv 19 65 writev 20 66 pread64 17 67 pwrite64 18 68 lseek 8 62 close 3 57 close_range 436 436
open 2 - openat 257 56 stat 4 - fstat 5 80 lstat 6 - newfstatat 262 79 statx 332 291 access 21 - faccessat 269 48
faccessat2 439 439 readlink 89 - readlinkat 267 78 getdents 78 - getdents64 217 61 getcwd 79 17 chdir 80 49 fchdir 81 50
fadvise64 221 223 umask 95 166 dup 32 23 dup2 33 - dup3 292 24 pipe 22 - pipe2 293 59 fcntl 72 25 ioctl 16 29
eventfd2 290 19 select 23 - pselect6 270 72 poll 7 - ppoll 271 73 epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 -
epoll_pwait 281 22 socketpair 53 199 sendto 44 206 recvfrom 45 207 shutdown 48 210 getsockopt 55 209 getsockname 51 204
mmap 9 222 mprotect 10 226 munmap 11 215 mremap 25 216 madvise 28 233 msync 26 227 mincore 27 232 brk 12 214
membarrier 324 283 rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 rt_sigpending 127 136
rt_sigtimedwait 128 137 rt_sigsuspend 130 133 sigaltstack 131 132 alarm 37 - pause 34 - getitimer 36 102
setitimer 38 103 restart_syscall 219 128 nanosleep 35 101 clock_nanosleep 230 115 clock_gettime 228 113
clock_getres 229 114 gettimeofday 96 169 time 201 - times 100 153 getpid 39 172 getppid 110 173 gettid 186 178
getuid 102 174 geteuid 107 175 getgid 104 176 getegid 108 177 getgroups 115 158 getresuid 118 148 getresgid 120 150
getpgrp 111 - getpgid 121 155 getsid 124 156 uname 63 160 sysinfo 99 179 getrusage 98 165 getrlimit 97 163
prlimit64 302 261 getpriority 140 141 sched_yield 24 124 sched_getaffinity 204 123 getcpu 309 168 getrandom 318 278
clone 56 220 exit 60 93 exit_group 231 94 futex 202 98 futex_waitv 449 449 set_tid_address 218 96 set_robust_list 273 99
get_robust_list 274 100 rseq 334 293 arch_prctl 158 - prctl 157 167
"""

# These must hold all together: (word of the arguments, bits that are looked at, values they may have). An argument is
# two words, the lower one first.
ALL_BITS = 0xFFFFFFFF
CONDITIONS = {
    "clone": [(0, 0x7E030000, (0x10000,))],  # CLONE_THREAD and no namespace
    "open": [(2, 0x203, (0, 1, 2, 0x201, 0x202))],  # O_RDONLY with O_TRUNC would empty a file it may only read
    "openat": [(4, 0x203, (0, 1, 2, 0x201, 0x202))],
    # Duplicate, the flags, locks, the size of a pipe. Not F_SETOWN and F_SETSIG: they send signals.
    "fcntl": [(2, ALL_BITS, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032))],
    "ioctl": [(2, ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],  # is it a terminal, how large; FIO*
    "prctl": [(0, ALL_BITS, (15, 16, 0x53564D41))],  # names of threads and of memory, not the signal at our death
    "prlimit64": [(0, ALL_BITS, (0,))],  # its own
    "socketpair": [(0, ALL_BITS, (1,)), (2, 0xF, (1,))],  # AF_UNIX, SOCK_STREAM: asyncio wakes itself with one
    "sendto": [(8, ALL_BITS, (0,)), (9, ALL_BITS, (0,))],  # only to the other end
}
CLONE3 = 435  # its flags are behind a pointer: not implemented, so that the C library uses clone

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD = 0x20
AND = 0x54
JUMP_IF_EQUAL = 0x15
RETURN = 0x06  # classic BPF
NUMBER = 0
ARCHITECTURE = 4
ARGUMENTS = 16  # where they are in what the filter is shown
KILL = 0x80000000
ALLOW = 0x7FFF0000
REFUSE = 0x50000 | errno.EPERM
NOT_IMPLEMENTED = 0x50000 | errno.ENOSYS


def filter_for(machine: str) -> bytes:
    """Return the filter for a machine as os.uname() names it. OSError: its numbers are not known here."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"its numbers for {machine} are not known here")
    # Operation, jump if true, jump if false, operand. Another way into the kernel, with other numbers, kills.
    code = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER), (JUMP_IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, NOT_IMPLEMENTED)]
    words = SYSTEM_CALLS.split()
    column = list(ARCHITECTURES).index(machine)
    for name, number in zip(words[::3], words[1 + column :: 3], strict=True):
        checks: list[tuple[int, int, int, int]] = []
        for word, bits, values in CONDITIONS.get(name, []):
            checks += [(LOAD, 0, 0, ARGUMENTS + 4 * word), (AND, 0, 0, bits)]
            checks += [(JUMP_IF_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
            checks.append((RETURN, 0, 0, REFUSE))
        if number != "-":
            code += [(JUMP_IF_EQUAL, 0, len(checks) + 1, int(number)), *checks, (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in [*code, (RETURN, 0, 0, REFUSE)])


def restrict_calls() -> None:
    """Allow only the listed system calls from here on."""
    instructions = ctypes.create_string_buffer(filter_for(os.uname().machine))
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(instructions))
    checked(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), program, 0, 0))


# ---- Files, privileges, limits ----

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    """Return what a call into the C library returned. OSError if that is an error."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, value: int) -> None:
    """Set an option of this process. Raises OSError where the kernel refuses."""
    checked(libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))


def leave_root() -> bool:
    """Give up root for a user whose threads are counted alone; return whether that was possible.

    The right to enter folders that only root can is kept, for the interpreter may be in one: Landlock decides what may
    be read. In a container with a single user it stays root, without other capabilities.
    """
    user = FIRST_USER + os.getpid()
    alone = False
    with contextlib.suppress(OSError):
        if os.geteuid() == 0:
            prctl(PR_SET_KEEPCAPS, 1)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            alone = True
    for mask in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE, 0):  # a container may have taken the one and left the other
        with contextlib.suppress(OSError):
            header = struct.pack("=Ii", 0x20080522, 0)
            checked(libc.capset(header, struct.pack("=6I", mask, mask, 0, 0, 0, 0)))
            break
    return alone


def limit(cpu_s: int, memory_bytes: int, file_bytes: int, threads: int, *, alone: bool) -> None:
    """Limit what this process may use."""
    if not alone:  # threads are counted by user: allow for as many others as there are on the system
        with open("/proc/loadavg") as file:
            threads += int(file.read().split()[3].split("/")[1])
    for which, most in {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,  # SIGXCPU, and a second later SIGKILL
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: threads,
    }.items():
        ceiling = resource.getrlimit(which)[1]
        hard = most + (which == resource.RLIMIT_CPU)
        if ceiling != resource.RLIM_INFINITY:
            most = min(most, ceiling)
            hard = min(hard, ceiling)
        resource.setrlimit(which, (most, hard))


def restrict_files(paths: list[str]) -> None:
    """Allow nothing to be opened, made, renamed or removed from here on but what the paths allow."""
    version = checked(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    everything = sum(rights for since, rights in RIGHTS_BY_VERSION.items() if version >= since)
    rules = checked(libc.syscall(LANDLOCK_CREATE, struct.pack("=Q", everything), ctypes.c_size_t(8), 0))
    for path in paths:
        opened = os.open(path[1:], os.O_PATH | os.O_CLOEXEC)
        checked(libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", RIGHTS[path[0]] & everything, opened), 0))
        os.close(opened)
    checked(libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def main() -> None:
    """Isolate this process, then run the program as a script."""
    parent, ready, job, cpu_s, memory_bytes, file_bytes, threads, *paths = sys.argv[1:]
    with os.fdopen(int(job), "rb") as file:
        source = file.read()
    alone = leave_root()
    missing = []
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after what makes the kernel forget it: a change of user
    if os.getppid() != int(parent):
        os._exit(1)
    os.chdir("/")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for name, take in {
        "limits": lambda: limit(int(cpu_s), int(memory_bytes), int(file_bytes), int(threads), alone=alone),
        "Landlock": lambda: restrict_files(paths),
        "seccomp": restrict_calls,  # the last, for it forbids what the others need
    }.items():
        try:
            take()
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")
    os.write(int(ready), f"{'; '.join(missing) or 'ready'}\n".encode())
    os.close(int(ready))
    if missing:
        os._exit(1)

    program = sys.modules["__main__"] = type(sys)("__main__")
    program.__file__ = FILE
    sys.argv[:] = [FILE]
    site.setquit()  # exit() and quit() are there as in any script, though installed packages are not
    exec(compile(source, FILE, "exec", dont_inherit=True), vars(program))  # noqa: S102


if __name__ == "__main__":
    main()
