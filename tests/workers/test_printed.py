"""What reward functions print: whole lines, safe to show, and no more than there is room for."""

from tinyrl.workers import calls
from tinyrl.workers.calls import Printed


def test_lines_are_whole_and_wait_until_someone_takes_them() -> None:
    taken: list[str] = []
    output = Printed("score")
    output.add(b"one\ntw")
    output.add(b"o\r\nthree")
    assert list(output.kept) == ["score: one", "score: two"]
    output.send_to(taken.append)
    assert taken == ["score: one\nscore: two\n"]
    assert not output.kept
    output.end_call()
    output.end_call()
    output.add("\xe9\n".encode() + b"\xff\n")
    assert taken[1:] == ["score: three\n", "score: \xe9\nscore: \ufffd\n"]


def test_logins_of_urls_and_control_characters_are_not_passed_on() -> None:
    output = Printed("judge")
    output.add(b"\x1b[31mcalling http://me:abc123@host/x and more\n")
    assert list(output.kept) == ["judge: [ESC][31mcalling http://***@host/x and more"]


def test_of_a_flood_the_beginning_is_kept() -> None:
    output = Printed("score")
    for _ in range(3):
        output.add(b"x" * calls.CALL_BYTES)
    output.end_call()
    output.add(b"next call\n")
    lines = list(output.kept)
    assert [len(lines[0]), *lines[1:]] == [
        len("score: ") + calls.CALL_BYTES,
        f"score: [{2 * calls.CALL_BYTES} more bytes left out]",
        "score: next call",
    ]


def test_only_the_last_lines_wait() -> None:
    output = Printed("score")
    output.add(b"".join(b"%d\n" % i for i in range(1000)))
    assert len(output.kept) == calls.KEPT_LINES
    assert output.kept[-1] == "score: 999"
