"""Messages between a run and a worker: JSON, one per line, over two pipes that nothing else uses.

    {"id", "timeout_s", "load": {"sources": [{"module", "file", "function"}], "host", "sys_path"}}
        -> {"id", "facts": the fields of ServiceFacts}
    {"id", "timeout_s", "call", "arguments": {name: list}, "shared": {name: value}, "num_rows"}
        -> {"id", "values": one per row, null for none, "failures": [[row, reason], ...], "comments", "slowest"}

Where the function's code raises, the reply is {"id", "error": text, "at": "file.py, line 3" or ""}. Each reply of a
process has "imported": the fields of an ImportedFile (imports.py) for each user module since the last one.

User code shares its process with the worker: it may write into the pipes, patch `json`, or fork and answer twice.
So encoder and decoder are bound when this file is imported, a reply carries the id of its request, and what is not
exactly a reply is Malformed, which fails the rows of the call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tinyrl.workers.imports import ImportedFile
from tinyrl.workers.values import RowFailure, RowResults

_encode = json.JSONEncoder().encode
_decode = json.JSONDecoder().decode


class Malformed(Exception):
    """What came is not the reply of a worker."""


@dataclass(frozen=True)
class ServiceFacts:
    """Facts about the service that a worker made of user code.

    parameters  names of the arguments that its calls take; None: any
    required    arguments that must be given
    asks        arguments that are named, also where any is taken
    whole       calls whose rows are not tried one by one when they fail
    of_host     fields of the host's own record, which `WorkerFunction.host_facts` reads
    """

    parameters: list[str] | None = None
    required: list[str] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    of_host: dict[str, Any] = field(default_factory=dict)


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as a line. Raises TypeError or ValueError for what JSON does not have."""
    return _encode(message).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Decode a line. Raises Malformed if it is not an object in JSON."""
    try:
        message = _decode(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    if not isinstance(message, dict):
        raise Malformed
    return message


def reply_to(request_id: int, line: bytes) -> dict[str, Any]:
    """Decode the reply to a request. Raises Malformed for any other line."""
    reply = decode(line)
    if reply.get("id") != request_id:
        raise Malformed
    return reply


def encode_results(results: RowResults) -> dict[str, Any]:
    """Return results as fields of a reply."""
    return {
        "values": results.values,
        "failures": [[failure.row, failure.reason] for failure in results.failures],
        "comments": results.comments,
        "slowest": results.slowest,
    }


def results_in(reply: dict[str, Any], num_rows: int) -> RowResults:
    """Return the results in a reply. Raises Malformed if it does not hold those of `num_rows` rows."""
    values = _list_in(reply, "values")
    comments = _list_in(reply, "comments")
    if len(values) != num_rows or len(comments) not in (0, num_rows):
        raise Malformed
    if not all(isinstance(comment, str) for comment in comments):
        raise Malformed
    failures = [_failure(entry, num_rows) for entry in _list_in(reply, "failures")]
    return RowResults(values, failures, comments, slowest=_slowest(reply.get("slowest"), num_rows))


def facts_in(reply: dict[str, Any]) -> ServiceFacts:
    """Return the facts of a service in a reply. Raises Malformed if it does not hold them."""
    match reply.get("facts"):
        case {
            "parameters": list() | None as parameters,
            "required": list(required),
            "asks": list(asks),
            "whole": list(whole),
            "of_host": dict(of_host),
        }:
            return ServiceFacts(parameters, required, asks, whole, of_host)
    raise Malformed


def imported_in(reply: dict[str, Any]) -> list[ImportedFile]:
    """Return the files in a reply that the worker has imported; none from this process. Raises Malformed."""
    found = list[ImportedFile]()
    for entry in _list_in({"imported": [], **reply}, "imported"):
        match entry:
            case [str(module), str(file), int(size), int(modified), str(sha256)]:
                found.append(ImportedFile(module, file, bytes=size, modified=modified, sha256=sha256))
            case _:
                raise Malformed
    return found


def _list_in(reply: dict[str, Any], name: str) -> list[Any]:
    found = reply.get(name)
    if not isinstance(found, list):
        raise Malformed
    return found


def _failure(entry: Any, num_rows: int) -> RowFailure:
    match entry:
        case [int(row), str(reason)] if 0 <= row < num_rows:
            return RowFailure(row, reason)
    raise Malformed


def _slowest(entry: Any, num_rows: int) -> tuple[float, int] | None:
    match entry:
        case None:
            return None
        case [float(seconds), int(row)] if 0 <= row < num_rows:
            return seconds, row
    raise Malformed
