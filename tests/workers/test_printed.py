"""Lines that reward functions print: whole, safe to show, and no more than there is room for."""

from tinyrl.workers import process
from tinyrl.workers.process import Printed


def test_lines_wait_until_someone_takes_them_and_are_cut_and_masked() -> None:
    taken: list[str] = []
    output = Printed("score")
    output.add(b"".join(b"%d\n" % i for i in range(1000)))
    assert (len(output.kept), output.kept[-1]) == (process.KEPT_LINES, "score: 999")
    output.send_to(taken.append)
    assert not output.kept
    output.add(
        "\xe9\r\n".encode() + b"\xff\n\x1b[31mcalling http://me:abc123@host/x and more\n" + b"x" * process.CALL_BYTES
    )
    lines = "".join(taken).splitlines()[process.KEPT_LINES :]
    assert lines[:2] == ["score: \xe9", "score: \ufffd"]
    assert lines[2] == "score: [ESC][31mcalling http://***@host/x and more"
    assert 0 < len(lines[3]) < process.CALL_BYTES
