"""The sandbox's launcher: a script, started fresh by isolation.py, that isolates itself and becomes the program.

    python launcher.py NAME=VALUE ... -- COMMAND ... -- PATH ...

A path that the program may look at has a letter in front: f to read a file, d a folder with all in it, l to list a
folder, w to read and write a file. Three processes:

    outer        namespaces of its own (network, processes, users, mounts, ...) where the system allows them
    supervisor   gives up root; waits for the program, ends it when it is told to or when the program is late, reports
    program      resource limits, Landlock, seccomp, and then the command in this process's place

Each dies with the one above it. Landlock and seccomp need no privilege, hold in a container too, and are what the
promise rests on; namespaces are a second wall, and bring a scratch folder whose size is limited (a tmpfs).

Sent over the status pipe, which the program does not have: "ready\\n" before it starts, or "refused: A; B\\n" where a
limit or a wall is missing; "exit STATUS CPU_SECONDS\\n" when it is over.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable

FIRST_USER = 2_000_000_000  # in place of root: a user that owns nothing, another one for each sandbox
LOOK_S = 0.5
LATE_S = 2.0  # our parent ends a late program; this long after that we do it ourselves
STACK_BYTES, MAX_FILES = 8 << 20, 64

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 8, 22, 38, 47
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
NEW_USER, NAMESPACES = 0x10000000, 0x6E020000  # mounts, cgroups, host name, IPC, processes, network
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
MAKE_DEVICES = 1 << 6 | 1 << 11
RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: 1 << 13, 3: TRUNCATE, 5: 1 << 15}  # each version adds to the ones before

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Be the outer process, and branch off the others."""
    first = sys.argv.index("--")
    second = sys.argv.index("--", first + 1)
    settings = dict(word.split("=", 1) for word in sys.argv[1:first])
    command, paths = sys.argv[first + 1 : second], sys.argv[second + 1 :]
    status = int(settings["status"])
    os.set_inheritable(status, False)
    die_with_parent(int(settings["parent"]))
    user, scratch, counted_alone = FIRST_USER + os.getpid(), "", False
    if settings["namespaces"] == "1":
        with contextlib.suppress(OSError):  # a container, or reserved for root: Landlock and seccomp hold without them
            counted_alone = enter_namespaces()
            scratch = make_scratch(settings["scratch_at"], int(settings["scratch_bytes"]))
    child = os.fork()
    if child:
        end_when_told(child, signal.SIGTERM)
        os.waitpid(child, 0)
        os._exit(0)
    die_with_parent(None)
    counted_alone |= leave_root(user, reachable=settings["reachable"] == "1")
    supervisor = os.getpid()
    program = os.fork()
    if not program:
        die_with_parent(supervisor)
        folder = scratch or "/"
        os.chdir(folder)
        missing = isolate(
            limits=lambda: limit_all(settings, counted_alone=counted_alone),
            Landlock=lambda: restrict_files([*paths, f"s{scratch}"] if scratch else paths),
            seccomp=lambda: restrict_calls(bytes.fromhex(settings["seccomp"])),
        )
        if missing:
            os.write(status, f"refused: {'; '.join(missing)}\n".encode())
            os._exit(1)
        os.write(status, b"ready\n")
        os.execve(command[0], command, {**os.environ, "HOME": folder, "TMPDIR": folder})
    end_when_told(program, signal.SIGKILL)
    end_when_late(time.monotonic() + float(settings["wall_s"]) + LATE_S)
    _, how, usage = os.wait4(program, 0)
    os.write(status, f"exit {how} {usage.ru_utime + usage.ru_stime:.3f}\n".encode())
    os._exit(0)


def end_when_told(child: int, told: int) -> None:
    """On SIGTERM, send `told` to the child; the process that waits for the child then ends too."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, told))


def end_when_late(deadline: float) -> None:
    """End the group, which is ours alone, at the deadline or once the parent is gone."""
    parent = os.getppid()

    def look(*_: object) -> None:
        if time.monotonic() > deadline or os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)


def die_with_parent(parent: int | None) -> None:
    """Be killed when the parent ends; leave if it already has. None: its number is not known in our namespace."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def enter_namespaces() -> bool:
    """Enter new namespaces of every kind, with the first child. Returns whether threads are counted apart there."""
    user, group = os.geteuid(), os.getegid()
    checked(libc.unshare(ctypes.c_int(NAMESPACES if user == 0 else NAMESPACES | NEW_USER)))
    if user != 0:  # root needs no user namespace, and inside one would still be root
        die_with_parent(None)  # forgotten when capabilities are gained
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit())
    return user != 0 and release >= (5, 14)  # since then threads are counted in each


def make_scratch(folder: str, num_bytes: int) -> str:
    """Mount a folder of limited size that ends with this process. "": none is wanted."""
    if not folder or not num_bytes:
        return ""
    checked(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    options = f"size={num_bytes},nr_inodes=1024,mode=1777".encode()
    checked(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(MS_NOSUID | MS_NODEV), options))
    return folder


def leave_root(user: int, *, reachable: bool) -> bool:
    """Give up root and every capability, for good. Returns whether we now are a user of our own.

    Where the interpreter lies in a folder that only root can enter, the right to read any file is kept: what may be
    read is up to Landlock either way.
    """
    own_user = False
    if os.geteuid() == 0:
        prctl(PR_SET_KEEPCAPS, 1)
        with contextlib.suppress(OSError):  # a container with one user only: without capabilities it is not much
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            own_user = True
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    die_with_parent(None)  # forgotten when the user changes
    for capability in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE) if own_user and not reachable else ():
        with contextlib.suppress(OSError):  # a container may have taken the one and left the other
            set_capabilities(1 << capability)
            prctl(PR_CAP_AMBIENT, 2, capability)
            return own_user
    set_capabilities(0)
    return own_user


def set_capabilities(mask: int) -> None:
    """Have these and no others, now and for good."""
    checked(libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", mask, mask, mask, 0, 0, 0)))


def isolate(**steps: Callable[[], None]) -> list[str]:
    """Take all steps, seccomp last, which forbids what the others need. Return those that the system does not allow."""
    missing = []
    for name, take in steps.items():
        try:
            take()
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")
    return missing


def limit_all(settings: dict[str, str], *, counted_alone: bool) -> None:
    """Limit what this process may use."""
    names = ("threads", "cpu_s", "scratch_bytes", "memory_bytes")
    threads, cpu_s, scratch_bytes, memory_bytes = (int(settings[name]) for name in names)
    others = 2  # supervisor and outer process
    if not counted_alone:  # threads are counted by user: allow for as many others as there are on the system
        with open("/proc/loadavg") as file:
            others += int(file.read().split()[3].split("/")[1])
    limits = {
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),  # SIGXCPU, and a second later SIGKILL
        resource.RLIMIT_FSIZE: (scratch_bytes, scratch_bytes),
        resource.RLIMIT_NOFILE: (MAX_FILES, MAX_FILES),
        resource.RLIMIT_STACK: (STACK_BYTES, STACK_BYTES),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NPROC: (threads + others, threads + others),
    }
    for which, (soft, hard) in limits.items():
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(which, (soft, hard))


def restrict_files(paths: list[str]) -> None:
    """Landlock: from here on nothing can be opened, made, renamed or removed but what the paths allow."""
    version = checked(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    everything = sum(rights for since, rights in RIGHTS_BY_VERSION.items() if version >= since)
    # TCP since version 4; signals and abstract sockets to those outside since version 6.
    attributes = struct.pack("=QQQ", everything, 3, 3)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = checked(libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0))
    use = {"f": EXECUTE | READ_FILE, "d": EXECUTE | READ_FILE | READ_DIR, "l": READ_DIR}
    use |= {"w": READ_FILE | WRITE_FILE | TRUNCATE, "s": ~MAKE_DEVICES}
    for path in paths:
        opened = os.open(path[1:], os.O_PATH | os.O_CLOEXEC)
        checked(libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", use[path[0]] & everything, opened), 0))
        os.close(opened)
    checked(libc.syscall(LANDLOCK_RESTRICT, rules, 0))


def restrict_calls(instructions: bytes) -> None:
    """seccomp: from here on only the listed system calls, in whatever this process becomes."""
    if not instructions:
        raise OSError(errno.ENOSYS, f"its numbers for {os.uname().machine} are not known here")
    kept = ctypes.create_string_buffer(instructions)
    prctl(PR_SET_SECCOMP, 2, struct.pack("@HP", len(instructions) // 8, ctypes.addressof(kept)))


def prctl(option: int, first: int, second: int | bytes = 0) -> None:
    """Set a property of this process. OSError: the system does not let us."""
    argument = second if isinstance(second, bytes) else ctypes.c_ulong(second)
    checked(libc.prctl(ctypes.c_int(option), ctypes.c_ulong(first), argument, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def checked(result: int) -> int:
    """What a call into the C library returned, if that is no error."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


if __name__ == "__main__":
    main()
