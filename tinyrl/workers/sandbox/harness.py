"""The harness in a sandbox's fresh interpreter: reads the program, runs it, calls its function.

    python harness.py JOB SOURCE_BYTES [REPLY FUNCTION]

JOB and REPLY are open pipes; the job is the program's source, then the arguments as a JSON list. The program shares
this process and may do what it likes with all of it: the harness knows no answers, so nothing here is worth forging.
What the program raises is left to end the process.
"""

import os
import site
import sys
from importlib.machinery import SourceFileLoader

FILE = "program.py"  # as tracebacks name it


class FromMemory(SourceFileLoader):
    """Loads a module from source that is in no file."""

    source = b""

    def get_data(self, path: str) -> bytes:
        """The source, whichever file is asked for."""
        return self.source


def main() -> None:
    """Run the program as a script, or load it as a module and reply with what its function returns."""
    job, source_bytes, *call = sys.argv[1:]
    with os.fdopen(int(job), "rb") as pipe:
        received = pipe.read()
    name = "program" if call else "__main__"
    module = type(sys)(name)
    loader = FromMemory(name, FILE)
    loader.source = received[: int(source_bytes)]
    module.__file__, module.__loader__ = FILE, loader  # the latter has the lines for `traceback`, `inspect`
    sys.modules[name] = module
    sys.argv[:] = [FILE]
    site.setquit()  # exit() and quit() are there as in any script, though installed packages are not
    loader.exec_module(module)
    if call:
        import json  # takes as long to import as the interpreter to start; a script does not need it

        found = module
        for part in call[1].split("."):
            found = getattr(found() if isinstance(found, type) else found, part)
        answer = json.dumps(found(*json.loads(received[int(source_bytes) :])))
        with os.fdopen(int(call[0]), "w") as pipe:
            pipe.write(answer)


if __name__ == "__main__":
    main()
