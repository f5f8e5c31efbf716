"""Lines that reward functions print: whole, safe to show, and no more than there is room for."""

from tinyrl.workers import calls
from tinyrl.workers.calls import Printed


def test_lines_wait_until_someone_takes_them_and_are_cut_and_masked() -> None:
    taken: list[str] = []
    output = Printed("score")
    output.add(b"one\ntwo\r\nthree")
    assert list(output.kept) == ["score: one", "score: two", "score: three"]
    output.send_to(taken.append)
    assert not output.kept
    output.add("\xe9\n".encode() + b"\xff\n\x1b[31mcalling http://me:abc123@host/x and more\n")
    output.add(3 * b"x" * calls.CALL_BYTES)
    lines = "".join(taken).splitlines()
    assert lines[:5] == ["score: one", "score: two", "score: three", "score: \xe9", "score: \ufffd"]
    assert lines[5] == "score: [ESC][31mcalling http://***@host/x and more"
    assert lines[7:] == [f"score: [{2 * calls.CALL_BYTES} more bytes left out]"]
    waiting = Printed("score")
    waiting.add(b"".join(b"%d\n" % i for i in range(1000)))
    assert (len(waiting.kept), waiting.kept[-1]) == (calls.KEPT_LINES, "score: 999")
