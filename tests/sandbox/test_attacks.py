"""Attacks from inside a sandbox, for real: each does what it can, as root's own user and as an ordinary one.

Where an attack must fail, the same one is shown to succeed outside, so that a bug in it is not mistaken for a wall.
"""

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.workers.test_orphans import wait_until_gone
from tinyrl.workers import sandbox
from tinyrl.workers.sandbox import CAGE, Limits, passes_tests, run_program, why_not_isolated

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(why_not_isolated() is not None, reason=str(why_not_isolated())),
]
MEGABYTE = 1 << 20
ATTEMPT = """
import ctypes, fcntl, json, os, resource, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"

def attempt(what, action):
    try:
        action()
    except OSError:
        return
    print(what)

def call(on_x86, on_arm, *arguments):
    result = libc.syscall(on_x86 if X86 else on_arm, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result

given = json.loads(input())
victim = given["victim"]
"""
SEEN_AS = """
import ctypes, os, sys
assert ctypes.CDLL(None).unshare(0x10000000) == 0
seen_as = sys.argv[1]
for name, text in (("setgroups", "deny"), ("uid_map", seen_as + " 0 1"), ("gid_map", seen_as + " 0 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture(params=["as we are", *(["as a user"] if os.geteuid() == 0 else [])])
def all_walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root also as an ordinary user: the program then has our own user, and only the walls protect us."""
    sandbox.visible_paths()
    if request.param == "as a user":
        monkeypatch.setattr(sandbox, "PYTHON", (sys.executable, "-S", "-c", SEEN_AS, "1000", *sandbox.PYTHON))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, which only a sandbox's walls protect; pytest's own folders are private."""
    tmp_path.joinpath("file").write_text("text")
    tmp_path.joinpath("file").chmod(0o666)
    for path in (tmp_path, *list(tmp_path.parents)[:2]):
        path.chmod(0o777)
    return tmp_path


@pytest.fixture
def given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Targets of the attacks: this process, its file, and sockets that it listens on."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    name = f"tinyrl-test-{os.getpid()}"
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (str(folder / "socket"), f"\0{name}"):
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen()
        folder.joinpath("socket").chmod(0o777)
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(f"\0{name}-datagrams")
        yield {
            "victim": os.getpid(),
            "address": id(None),
            "file": str(folder / "file"),
            "home": os.path.expanduser("~"),
            "package": str(next(Path(os.__file__).parent.glob("*-packages/*/*.py"), pytest.__file__)),
            "port": server.getsockname()[1],
            "socket": str(folder / "socket"),
            "name": name,
        }


# Reaching out

ATTACKS = {
    "network": """
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", given["port"]), timeout=5))
attempt("udp", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)))
attempt("names", lambda: socket.getaddrinfo("localhost", 80))
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect(given["socket"]))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + given["name"]))
def from_pair():
    socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", "\\0" + given["name"] + "-datagrams")
attempt("datagram", from_pair)
attempt("packets", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
attempt("uring", lambda: call(425, 425, 1, bytes(120)))
""",
    "files": """
attempt("file", lambda: open(given["file"]).read())
attempt("folder", lambda: os.listdir(os.path.dirname(given["file"])))
attempt("home", lambda: os.listdir(given["home"]))
attempt("passwords", lambda: open("/etc/passwd").read())
attempt("root", lambda: os.listdir("/"))
attempt("environment", lambda: open(f"/proc/{victim}/environ").read())
attempt("command", lambda: open(f"/proc/{os.getppid() or 1}/cmdline").read())
attempt("itself", lambda: open("/proc/self/environ").read())
attempt("memory", lambda: open(f"/proc/{victim}/mem", "rb"))
attempt("processes", lambda: os.listdir("/proc"))
attempt("package", lambda: open(given["package"]).read())
attempt("handle", lambda: call(303, 264, -100, given["file"].encode(), bytes(16), bytes(8), 0))
""",
    "processes": """
attempt("signal", lambda: os.kill(victim, 0))
attempt("group", lambda: os.killpg(os.getpgid(victim), 0))
attempt("thread", lambda: call(234, 131, victim, victim, 0))
attempt("queue", lambda: call(129, 138, victim, 0, (ctypes.c_int * 32)(0, 0, -1)))
attempt("descriptor", lambda: call(434, 434, victim, 0))
attempt("limit", lambda: resource.prlimit(victim, resource.RLIMIT_CORE))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, victim, os.getpriority(os.PRIO_PROCESS, victim)))
attempt("affinity", lambda: os.sched_setaffinity(victim, os.sched_getaffinity(victim)))
def by_pipe():
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, victim)
    fcntl.fcntl(reading, 10, signal.SIGURG)
attempt("pipe", by_pipe)
def read_memory():
    vector = (ctypes.c_ulong * 2)(given["address"], 1)
    buffer = ctypes.create_string_buffer(8)
    here = (ctypes.c_ulong * 2)(ctypes.addressof(buffer), 1)
    call(310, 270, victim, here, ctypes.c_ulong(1), vector, ctypes.c_ulong(1), ctypes.c_ulong(0))
attempt("memory", read_memory)
attempt("trace", lambda: call(101, 117, 0x4206, victim, 0, 0))
""",
    "walls": """
def prctl(*arguments): call(157, 167, *arguments)
attempt("pdeathsig", lambda: prctl(1, 0))
attempt("setsid", lambda: os.setpgid(0, 0) or os.setsid())
attempt("mount", lambda: call(165, 40, b"tmpfs", b"/mnt", b"tmpfs", 0, b"") if os.getuid() else None)
attempt("unshare", lambda: call(272, 97, 0x10000000))
attempt("memfd", lambda: call(319, 279, b"x", 0))
attempt("shared", lambda: call(31, 195, call(29, 194, 0, 1 << 20, 0o1600), 0, None))  # made and removed
attempt("keys", lambda: call(250, 219, 0, -3, 1))
attempt("bpf", lambda: call(321, 280, 0, bytes(72), 72))
attempt("chroot", lambda: os.chroot("/"))
attempt("user", lambda: os.setuid(0))
""",
}
MAY_FAIL_OUTSIDE = {"uring", "handle", "setsid", "mount", "keys", "bpf", "chroot", "user"}


@pytest.mark.usefixtures("all_walls")
@pytest.mark.parametrize("name", ATTACKS)
def test_what_works_outside_fails_in_a_sandbox(name: str, given: dict[str, Any]):
    program, stdin = ATTEMPT + ATTACKS[name], json.dumps(given)
    inside = run_program(program, stdin=stdin)
    assert (inside.reason, inside.stdout) == ("ok", ""), inside.stderr
    command = [sys.executable, "-c", program]
    outside = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=True)
    attempts = set(re.findall(r'attempt\("([\w-]+)"', program))
    assert len(attempts) > 5
    assert attempts - MAY_FAIL_OUTSIDE <= set(outside.stdout.split())


CHANGES = """
folder = os.path.dirname(victim)
attempt("read", lambda: open(victim).read())
attempt("append", lambda: open(victim, "a").write("x"))
attempt("replace", lambda: open(victim, "w"))
attempt("empty", lambda: os.truncate(victim, 0))
attempt("empty-reading", lambda: os.close(os.open(victim, os.O_RDONLY | os.O_TRUNC)))
attempt("mode", lambda: os.chmod(victim, 0o600))
attempt("mode-of-open", lambda: os.fchmod(os.open(victim, os.O_RDONLY), 0o600))
attempt("times", lambda: os.utime(victim, (1, 1)))
attempt("owner", lambda: os.chown(victim, os.getuid(), os.getgid()))
attempt("attribute", lambda: os.setxattr(victim, "user.x", b"x"))
attempt("link", lambda: os.link(victim, folder + "/linked"))
attempt("symlink", lambda: os.symlink(victim, folder + "/symlinked"))
attempt("folder", lambda: os.mkdir(folder + "/made"))
attempt("fifo", lambda: os.mkfifo(folder + "/fifo"))
attempt("new", lambda: open(folder + "/new", "w"))
attempt("rename", lambda: os.rename(victim, folder + "/renamed"))
attempt("remove", lambda: os.remove(victim))
attempt("remove-folder", lambda: os.rmdir(folder))
"""


@pytest.mark.usefixtures("all_walls")
def test_our_files_cannot_be_changed_though_they_can_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def state() -> tuple[Any, ...]:
        return victim.read_bytes(), victim.stat().st_mtime_ns, victim.stat().st_mode, sorted(os.listdir(folder))

    victim, paths = folder / "file", sandbox.visible_paths()
    monkeypatch.setattr(sandbox, "visible_paths", lambda: (*paths, f"f{victim}"))
    before = state()
    inside = run_program(ATTEMPT + CHANGES, stdin=json.dumps({"victim": str(victim)}))
    assert state() == before
    assert (inside.reason, inside.stdout) == ("ok", "read\n"), inside.stderr


@pytest.mark.usefixtures("all_walls")
def test_no_process_can_be_started_or_killed_and_no_descriptor_of_ours_is_open():
    """A program may kill itself: what matters is that we survive."""
    for action in (
        "for pid in (-1, 0, 1, os.getppid() or 1): os.kill(pid, signal.SIGKILL)",
        "os.fork()",
        "subprocess.run(['true'])",
        "os.posix_spawn(sys.executable, ['x'], {})",
        "os.system('true') == 0 or 1/0",
    ):
        outcome = run_program(f"import os, signal, subprocess, sys\n{action}\nprint('done')")
        assert (outcome.stdout, outcome.exit_code) == ("", 1), action
    program = """
import fcntl
def is_open(fd):
    try: return fcntl.fcntl(fd, fcntl.F_GETFD) >= 0
    except OSError: return False
print([fd for fd in range(64) if is_open(fd)])
"""
    with open(os.devnull) as ours:
        os.set_inheritable(ours.fileno(), True)
        assert run_program(program).stdout == "[0, 1, 2]\n"


# Using too much

ENDLESS = [
    "import time; time.sleep(1000)",
    "while True: pass",
    "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
    "import re; re.match('(a+)+b', 'a' * 60)",  # holds the interpreter's lock
    "import sys; sys.stdin.close(); sys.stdout.close(); sys.stderr.close()\nwhile True: pass",
    "import os, time; os.closerange(0, 64); time.sleep(1000)",
    "import atexit, time; atexit.register(time.sleep, 1000)",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
]


def test_a_program_that_does_not_end_is_ended():
    """And it leaves no process for us, or for a container's first process, to wait for."""
    before = psutil.Process().children()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become our children
    with ThreadPoolExecutor(len(ENDLESS)) as pool:  # at once: their time is the same for all
        outcomes = list(pool.map(lambda program: run_program(program, limits=Limits(wall_s=0.7)), ENDLESS))
    assert [(outcome.reason, outcome.exit_code) for outcome in outcomes] == [("timed out", None)] * len(ENDLESS)
    left = psutil.Process().children()
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    assert [process for process in left if process not in before] == []


@pytest.mark.slow
def test_processor_time_ends():
    program = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(program, limits=Limits(cpu_s=1, wall_s=60)).reason == "out of CPU time"


HUNGRY = {
    "x = bytearray(10 ** 10)": ("out of memory",),
    "x = []\nwhile True: x.append(bytearray(10 ** 6))": ("out of memory",),
    "import mmap; x = mmap.mmap(-1, 10 ** 10)": ("exit code 1: OSError: [Errno 12] Cannot allocate memory",),
    **dict.fromkeys(
        [
            "def f(): f()\nf()",
            "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
            "import sys; sys.setrecursionlimit(10 ** 9)\nclass A:\n    __repr__ = lambda self: repr(self)\nrepr(A())",
            "x = []\nfor _ in range(10 ** 5): x = [x]\nrepr(x)",
        ],
        ("exit code 1: RecursionError", "exit code 1: SystemError", "killed by SIGSEGV", "out of memory", "timed out"),
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize("program", HUNGRY)
def test_memory_and_recursion_end(program: str):
    outcome = run_program(program, limits=Limits(memory_bytes=128 * MEGABYTE, wall_s=3))
    assert outcome.reason.startswith(HUNGRY[program]), outcome.reason


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_ends_and_takes_no_more_memory_than_its_limit(stream: str):
    program = f"import sys\nwhile True: sys.{stream}.write('x' * 100_000)"
    outcome = run_program(program, limits=Limits(output_bytes=1000))
    assert (outcome.reason, len(getattr(outcome, stream))) == ("output too long", 1000)
    assert run_program("print('x' * 999)", limits=Limits(output_bytes=1000)).ok
    program = """
import os
written = 0
try:
    while written < 10**7: written += os.write(2, b"x" * 10**5)
except OSError:
    pass
print(written)
"""
    outcome = run_program(program, limits=Limits(output_bytes=1000))
    assert (outcome.stdout, outcome.reason) == ("1001\n", "output too long")
    assert len(run_program("raise ValueError('x' * 10 ** 5)").reason) < 400


def test_no_file_can_be_written_and_threads_end():
    """Neither a large file nor many, wherever that may be; and no file of one run is there in the next."""
    program = """
import os, tempfile, threading
written, started, stop = [], 0, threading.Event()
for folder in (os.getcwd(), "/tmp", "/var/tmp", "/dev/shm", "/run", os.path.expanduser("~")):
    try:
        for number in range(100):
            with open(f"{folder}/left{number}", "wb", buffering=0) as file:
                file.write(b"x" * 10**6)
            written.append(folder)
    except OSError:
        pass
try:
    tempfile.gettempdir()
except FileNotFoundError:
    print(written)
threading.stack_size(1 << 16)
try:
    while started < 20_000:
        threading.Thread(target=stop.wait, daemon=True).start()
        started += 1
except RuntimeError:
    print(started)
"""
    written, started = run_program(program, limits=Limits(threads=8)).stdout.splitlines()
    there = 0 if os.geteuid() == 0 else len(list(Path("/proc").glob("[0-9]*/task/*"))) + 100  # not ours alone to count
    assert written == "[]"
    assert 6 <= int(started) <= 8 + there


# Forging a verdict

FORGERIES = {
    "overrides everything": """
import builtins, json, sys
json.dumps = lambda *a, **k: '3'
builtins.len = builtins.isinstance = builtins.type = lambda *a, **k: True
""",
    "equals all": """
class All(str):
    __eq__ = __le__ = __ge__ = lambda *a: True
    __ne__ = lambda *a: False
    __hash__ = lambda self: 3
print(All(2))
""",
    "prints verdicts": "print('passed', True, '[3]', 3, flush=True)",
    "leaves at once": "import os; os._exit(0)",
    "closes everything": "import os; os.closerange(0, 64)",
    "answers and fails": "print(3, flush=True); import os; os._exit(1)",
    "answers and dies": "print(3, flush=True); import os; os.abort()",
    "writes everywhere": """
import os
for fd in range(64):
    try: os.write(fd, b'{"passed": true}')
    except OSError: pass
""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_answer_does_not_pass(name: str):
    assert [verdict.passed for verdict in passes_tests(FORGERIES[name] + "\nprint(2)", [("1", "3")])] == [False]


def test_the_expected_answer_is_nowhere_in_the_sandbox_and_nothing_carries_over_from_one_case_to_the_next():
    """A program that searches all objects, its arguments, its environment and its input does not find it."""
    program = """
import gc, os, sys, threading, time
kept = []
def f(half):
    kept.append(half)
    needle = half + half[::-1]
    text = repr([sys.argv, sys.orig_argv, dict(os.environ), sys.stdin.read(), gc.get_objects()])
    return text.count(needle), text.count(half) > 0, len(kept)
print(*f(input()))
threading.Thread(target=time.sleep, args=(0.05,)).start()
"""
    verdicts = passes_tests(program, [("31337", "3133773313")] * 2)
    assert [verdict.outcome.stdout for verdict in verdicts] == ["0 True 1\n"] * 2, verdicts


# Nothing outlives its parent

PARENT = """
from tinyrl.workers.sandbox import Limits, run_program, why_not_isolated
why_not_isolated()
print("ready", flush=True)
run_program("import time\\nwhile True: time.sleep(0.01)", limits=Limits(wall_s=1000))
"""


def test_nothing_outlives_a_killed_parent():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE)
    assert parent.stdout
    assert parent.stdout.readline() == b"ready\n"
    deadline, family = time.monotonic() + 30, []
    while not family and time.monotonic() < deadline:
        family = [each for each in psutil.Process(parent.pid).children() if CAGE in each.cmdline()]
        time.sleep(0.2)  # until it is in the program
    assert len(family) == 1
    parent.kill()
    parent.wait()
    assert wait_until_gone([family[0].pid]) == []
