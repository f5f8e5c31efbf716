"""Attacks from inside a sandbox, for real: each does what it can, as root's own user and as an ordinary one.

Where an attack must fail, the same one is shown to succeed outside, so that a bug in it is not mistaken for a wall.
"""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.workers.test_orphans import wait_until_gone
from tinyrl.workers import sandbox
from tinyrl.workers.sandbox import (
    CAGE,
    Limits,
    Outcome,
    call_function,
    passes_calls,
    passes_tests,
    run_program,
    why_not_isolated,
)

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(why_not_isolated() is not None, reason=str(why_not_isolated())),
]
MEGABYTE = 1 << 20
ATTEMPT = """
import ctypes, json, os, socket, sys
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


def hold(attack: str, *, may_fail_outside: Collection[str] = (), **given: object) -> None:
    """Each attempt of an attack fails in a sandbox, where it is tried first, and works outside."""
    program, stdin = ATTEMPT + textwrap.dedent(attack), json.dumps(given)
    inside = run_program(program, stdin=stdin)
    assert (inside.reason, inside.stdout) == ("ok", ""), inside.stderr
    command = [sys.executable, "-c", program]
    outside = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=True)
    attempts = set(re.findall(r'attempt\("([\w-]+)"', attack))
    assert len(attempts) > 5
    assert attempts - {*may_fail_outside} <= set(outside.stdout.split())


def open_to_all(folder: Path) -> None:
    """Leave only a sandbox's walls to protect what is in the folder; pytest's own folders are private."""
    for path in (folder, *list(folder.parents)[:2]):
        path.chmod(0o777)


def run_briefly(program: str, *, wall_s: float = 0.4, **limits: int) -> Outcome:
    return run_program(program, limits=Limits(wall_s=wall_s, **limits))


# Reaching out


@pytest.mark.usefixtures("all_walls")
def test_the_network_cannot_be_reached(tmp_path: Path):
    open_to_all(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as in_file:
        in_file.bind(str(tmp_path / "socket"))
        in_file.listen()
        tmp_path.joinpath("socket").chmod(0o777)
        abstract, datagrams = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with abstract, datagrams:
            abstract.bind(f"\0tinyrl-test-{os.getpid()}")
            abstract.listen()
            datagrams.bind(f"\0tinyrl-test-{os.getpid()}-datagrams")
            hold(
                """
                attempt("tcp", lambda: socket.create_connection(("127.0.0.1", given["port"]), timeout=5))
                attempt("udp", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)))
                attempt("names", lambda: socket.getaddrinfo("localhost", 80))
                attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
                attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect(given["path"]))
                attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + given["name"]))
                def from_pair():
                    socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", "\\0" + given["name"] + "-datagrams")
                attempt("datagram", from_pair)
                attempt("packets", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
                attempt("uring", lambda: call(425, 425, 1, bytes(120)))
                """,
                port=server.getsockname()[1],
                path=str(tmp_path / "socket"),
                name=f"tinyrl-test-{os.getpid()}",
                may_fail_outside={"uring"},
            )


@pytest.mark.usefixtures("all_walls")
def test_our_files_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    canary = tmp_path / "canary"
    canary.write_text("sings")
    canary.chmod(0o666)
    open_to_all(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    hold(
        """
        attempt("file", lambda: open(given["canary"]).read())
        attempt("folder", lambda: os.listdir(os.path.dirname(given["canary"])))
        attempt("home", lambda: os.listdir(given["home"]))
        attempt("passwords", lambda: open("/etc/passwd").read())
        attempt("root", lambda: os.listdir("/"))
        attempt("environment", lambda: open(f"/proc/{given['parent']}/environ").read())
        attempt("command", lambda: open(f"/proc/{os.getppid() or 1}/cmdline").read())
        attempt("itself", lambda: open("/proc/self/environ").read())
        attempt("memory", lambda: open(f"/proc/{given['parent']}/mem", "rb"))
        attempt("processes", lambda: os.listdir("/proc"))
        attempt("package", lambda: open(given["package"]).read())
        attempt("handle", lambda: call(303, 264, -100, given["canary"].encode(), bytes(16), bytes(8), 0))
        """,
        canary=str(canary),
        home=os.path.expanduser("~"),
        parent=os.getpid(),
        may_fail_outside={"handle"},
        package=str(next(Path(os.__file__).parent.glob("*-packages/*/*.py"), pytest.__file__)),
    )


@pytest.mark.usefixtures("all_walls")
@pytest.mark.parametrize("readable", [False, True])
def test_our_files_cannot_be_changed(readable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither those it may read, nor by calls that need no open file."""
    victim = tmp_path / "victim"
    victim.write_text("text")
    victim.chmod(0o666)
    open_to_all(tmp_path)
    if readable:
        paths = (*sandbox.visible_paths(), f"f{victim}")
        monkeypatch.setattr(sandbox, "visible_paths", lambda: paths)
    before = (victim.read_bytes(), victim.stat().st_mtime_ns, victim.stat().st_mode, sorted(os.listdir(tmp_path)))
    program = """
victim, folder = given["victim"], os.path.dirname(given["victim"])
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
    inside = run_program(ATTEMPT + program, stdin=json.dumps({"victim": str(victim)}))
    after = (victim.read_bytes(), victim.stat().st_mtime_ns, victim.stat().st_mode, sorted(os.listdir(tmp_path)))
    assert after == before
    assert inside.ok, inside.stderr
    assert inside.stdout == ("read\n" if readable else "")


@pytest.mark.usefixtures("all_walls")
def test_other_processes_cannot_be_touched():
    hold(
        """
        import fcntl, resource, signal
        victim = given["victim"]
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
        victim=os.getpid(),
        address=id(None),
    )


@pytest.mark.usefixtures("all_walls")
def test_every_process_cannot_be_killed():
    """It may kill itself: what matters is that we survive."""
    outcome = run_program("import os, signal\nfor pid in (-1, 0, 1, os.getppid() or 1): os.kill(pid, signal.SIGKILL)")
    assert outcome.reason.startswith("exit code 1: PermissionError")


@pytest.mark.usefixtures("all_walls")
def test_the_walls_cannot_be_taken_down():
    hold(
        """
        import signal
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
        may_fail_outside={"setsid", "mount", "keys", "bpf", "chroot", "user"},
    )


def test_no_descriptor_of_ours_is_open():
    program = """
import fcntl
def found():
    there = []
    for fd in range(64):
        try: fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError: continue
        there.append(fd)
    return there
print(found())
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
        outcomes = list(pool.map(lambda program: run_briefly(program, wall_s=0.7), ENDLESS))
    assert [(outcome.reason, outcome.exit_code) for outcome in outcomes] == [("timed out", None)] * len(ENDLESS)
    assert max(outcome.seconds for outcome in outcomes) < 30
    left = psutil.Process().children()
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    assert [process for process in left if process not in before] == []


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["", "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"])
def test_processor_time_ends(stop: str):
    outcome = run_program(f"{stop}while True: pass", limits=Limits(cpu_s=1, wall_s=60))
    assert (outcome.reason, outcome.cpu_seconds >= 0.5) == ("out of CPU time", True)  # the kernel samples it


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(10 ** 10)",
        "x = []\nwhile True: x.append(bytearray(10 ** 6))",
        "import mmap; x = mmap.mmap(-1, 10 ** 10)",
    ],
)
def test_memory_ends(program: str):
    outcome = run_program(program, limits=Limits(memory_bytes=128 * MEGABYTE))
    assert outcome.reason == "out of memory" or "Cannot allocate memory" in outcome.reason, outcome


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_ends(stream: str):
    program = f"import sys\nwhile True: sys.{stream}.write('x' * 100_000)"
    outcome = run_program(program, limits=Limits(output_bytes=1000))
    assert (outcome.reason, len(getattr(outcome, stream))) == ("output too long", 1000)
    assert run_program("print('x' * 999)", limits=Limits(output_bytes=1000)).ok
    [outcome] = call_function("def f(): return 'x' * 10 ** 7", "f", [[]], limits=Limits(output_bytes=1000))
    assert (outcome.reason, outcome.value) == ("output too long", None)


def test_output_takes_no_more_memory_than_its_limit():
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


def test_no_file_can_be_written():
    """Neither a large one nor many, wherever that may be."""
    program = """
import os, tempfile
written = []
for folder in (os.getcwd(), "/tmp", "/var/tmp", "/dev/shm", "/run", os.path.expanduser("~"), tempfile.gettempdir()):
    try:
        for number in range(100):
            with open(f"{folder}/left{number}", "wb", buffering=0) as file:
                file.write(b"x" * 10**6)
            written.append(folder)
    except OSError:
        pass
print(written)
"""
    outcome = run_program(program)
    assert outcome.reason.startswith("exit code 1: FileNotFoundError: [Errno 2] No usable temporary directory")
    assert run_program(program.replace(", tempfile.gettempdir()", "")).stdout == "[]\n"


@pytest.mark.parametrize(
    "start",
    [
        "os.fork()",
        "subprocess.run(['true'])",
        "os.posix_spawn(sys.executable, ['x'], {})",
        "os.system('true') == 0 or 1/0",
    ],
)
def test_no_process_can_be_started(start: str):
    outcome = run_program(f"import os, subprocess, sys\n{start}\nprint('started')")
    assert outcome.stdout == ""
    assert outcome.reason.startswith("exit code 1: ")


def test_threads_end():
    program = """
import threading
stop, started = threading.Event(), 0
threading.stack_size(1 << 16)
try:
    while started < 20_000:
        threading.Thread(target=stop.wait, daemon=True).start()
        started += 1
except RuntimeError:
    pass
print(started)
"""
    outcome = run_program(program, limits=Limits(threads=8))
    there = 0 if os.geteuid() == 0 else len(list(Path("/proc").glob("[0-9]*/task/*"))) + 100  # not ours alone to count
    assert 6 <= int(outcome.stdout) <= 8 + there


@pytest.mark.parametrize(
    "program",
    [
        "def f(): f()\nf()",
        "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        "import sys; sys.setrecursionlimit(10 ** 9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        "x = []\nfor _ in range(10 ** 5): x = [x]\nrepr(x)",
    ],
)
def test_recursion_ends(program: str):
    outcome = run_briefly(program, memory_bytes=128 * MEGABYTE)
    ends = ("exit code 1: RecursionError", "killed by SIGSEGV", "out of memory", "timed out")
    assert outcome.reason.startswith(ends), outcome.reason


@pytest.mark.parametrize("text", ["raise ValueError('x' * 10 ** 7)", "raise ValueError('x\\n' * 10 ** 6)"])
def test_a_huge_message_is_cut(text: str):
    outcome = run_program(text)
    assert outcome.reason == "output too long"
    assert len(outcome.stderr) <= Limits().output_bytes
    assert len(run_program("raise ValueError('x' * 10 ** 5)").reason) < 400


# Forging a verdict

FORGERIES = {
    "overrides everything": """
import builtins, json, sys
json.dumps = lambda *a, **k: '2'
builtins.print = builtins.len = builtins.isinstance = builtins.type = lambda *a, **k: True
""",
    "equals all": """
class All(int):
    __eq__ = __le__ = __ge__ = lambda *a: True
    __ne__ = lambda *a: False
    __hash__ = lambda self: 3
""",
    "prints verdicts": "print('passed', True, '[3]', 3, flush=True)",
    "leaves at once": "import os; os._exit(0)",
    "closes everything": "import os; os.closerange(0, 64)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_answer_does_not_pass(name: str):
    program = FORGERIES[name] + "\ndef f(x): return All(2) if 'All' in globals() else 2\nprint(2)"
    assert [verdict.passed for verdict in passes_calls(program, "f", [([1], 3)])] == [False]
    assert [verdict.passed for verdict in passes_tests(program, [("1", "3")])] == [False]


def test_the_expected_answer_is_nowhere_in_the_sandbox():
    """A program that searches all objects, its arguments, its environment and its input does not find it."""
    program = """
import gc, os, sys
kept = []
def f(half):
    kept.append(half)
    needle = half + half[::-1]
    text = repr([sys.argv, sys.orig_argv, dict(os.environ), sys.stdin.read(), gc.get_objects()])
    return text.count(needle), text.count(half) > 0
"""
    [verdict] = passes_calls(program, "f", [(["31337"], "3133773313")])
    assert verdict.outcome.value == [0, True], verdict.outcome


def test_what_is_written_in_place_of_a_value_is_no_more_than_one():
    """The program may print a value and leave: it has then returned that, or something that is not JSON."""
    program = """
import os
def f(text, code):
    for fd in range(1, 64):
        try: os.write(fd, text.encode())
        except OSError: pass
    if code is not None:
        os._exit(code)
    return 5
"""
    cases = [["3", 0], ["3\n", None], ["3", 1], ['{"passed": true}', 0], ["]", 0], ["[-1e400]", 0]]
    outcomes = call_function(program, "f", cases)
    assert [outcome.value for outcome in outcomes] == [3, 5, None, {"passed": True}, None, None]
    reasons = ["ok", "ok", "exit code 1", "ok", *["did not return a value that is JSON"] * 2]
    assert [outcome.reason.partition(":")[0] for outcome in outcomes] == reasons


def test_one_case_cannot_answer_for_another():
    """Nothing carries over from one run to the next: no file, no process, no memory."""
    program = """
import os, threading, time
def f(x):
    left = []
    for folder in {os.getcwd(), "/tmp", "/var/tmp", "/dev/shm"}:
        try:
            left += [name for name in os.listdir(folder) if name == "left"]
            open(folder + "/left", "w").close()
        except OSError:
            pass
    threading.Thread(target=time.sleep, args=(0.05,)).start()
    return left
"""
    assert [outcome.value for outcome in call_function(program, "f", [[1], [2]])] == [[], []]
    assert not Path("/tmp/left").exists()


@pytest.mark.parametrize(
    "value",
    ["float('nan')", "[float('inf')]", "deep(10 ** 5)", "10 ** 10000", "type('A', (), {'__eq__': lambda *a: True})()"],
)
def test_what_is_not_json_is_no_value(value: str):
    program = f"""
def deep(n):
    x = 3
    for _ in range(n): x = [x]
    return x
def f(): return {value}
"""
    [verdict] = passes_calls(program, "f", [([], 3)])
    assert (verdict.passed, verdict.outcome.ok, verdict.outcome.value) == (False, False, None)


@pytest.mark.parametrize("text", ["[", "9", '"\\ud800'])
def test_a_reply_that_would_hurt_its_reader_does_not(text: str):
    program = f"""
import os
def f():
    for fd in range(1, 64):
        try: os.write(fd, {text!r}.encode() * 10 ** 5)
        except OSError: pass
    os._exit(0)
"""
    [outcome] = call_function(program, "f", [[]])
    assert (outcome.reason, outcome.value) == ("did not return a value that is JSON", None)


# Nothing outlives its parent

PARENT = """
import sys
from tinyrl.workers.sandbox import Limits, run_program, why_not_isolated
why_not_isolated()
print("ready", flush=True)
run_program("import time\\nwhile True: time.sleep(0.01)", limits=Limits(wall_s=1000))
"""


@pytest.mark.parametrize("killed", ["parent", "program"])
def test_nothing_outlives_a_killed_parent(killed: str):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE)
    assert parent.stdout
    assert parent.stdout.readline() == b"ready\n"
    deadline, family = time.monotonic() + 30, []
    while not family and time.monotonic() < deadline:
        family = [each for each in psutil.Process(parent.pid).children() if CAGE in each.cmdline()]
        time.sleep(0.2)  # until it is in the program
    assert len(family) == 1
    os.kill(parent.pid if killed == "parent" else family[0].pid, signal.SIGKILL)
    assert parent.wait(timeout=30) == (-signal.SIGKILL if killed == "parent" else 0)
    assert wait_until_gone([family[0].pid]) == []
