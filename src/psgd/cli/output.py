"""Output of all commands: results and nothing else on stdout, one line for an error, and the exit codes."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

#: exit codes: failed on the way; could not begin; Ctrl-C; and, as with shells, output that is not read
FAILED, USAGE, INTERRUPTED, CLOSED = 1, 2, 130, 141

#: error that typer raises for a wrong option, argument or command; it has no public name there
USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

Json = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON document on stdout, and progress on stderr.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results, no progress.")]


class FailedError(Exception):
    """Error of a command that is not a bug; the message is for people."""


class ClosedError(Exception):
    """Error of output that is no longer read, as after ``psgd … | head``."""


class Stream(Console):
    """Console without markup, with control characters on terminals alone, whatever the environment says."""

    def __init__(self, file: TextIO | None = None, *, stderr: bool = False) -> None:
        target = file or (sys.stderr if stderr else sys.stdout)
        terminal = target is not None and target.isatty()
        # A table that is piped is not cut to the width of a terminal.
        super().__init__(
            file=file,
            stderr=stderr,
            force_terminal=terminal,
            width=None if terminal or "COLUMNS" in os.environ else 160,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def say(self, text: object) -> None:
        """Print one line, however long."""
        self.print(str(text), soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise ClosedError


class Output:
    """Progress and results of a command.

    Args:
        as_json: whether the result is one JSON document on stdout, and progress goes to stderr
        quiet: whether progress is not printed
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        people = Stream()
        #: results for people; with ``as_json`` they are not printed
        self.results = _nowhere() if as_json else people
        #: progress; the same object as the results if both go to stdout, so that results do not run into the bars
        self.progress = _nowhere() if quiet else Stream(stderr=True) if as_json else people

    def document(self, content: Mapping[str, Any]) -> None:
        """Print the whole result as JSON, if that was requested."""
        if self.as_json:
            text = json.dumps(_plain(content), indent=1, allow_nan=False)
            try:
                print(text, flush=True)
            except BrokenPipeError:
                raise ClosedError from None


class Commands(TyperGroup):
    """Commands that handle Ctrl-C themselves, as typer does so differently in each version."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None


def run(app: typer.Typer, args: Sequence[str] | None) -> int:
    """Run a command and return its exit code. Only a bug of ours ends in a traceback."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some terminals have no Greek letters
    try:
        code = int(app(args, prog_name="psgd", standalone_mode=False) or 0)
        _flush()  # now, when a failure can be reported, and not while the interpreter exits
    except ClosedError:
        code = CLOSED
    except SystemExit:  # typer raises it for a closed pipe, and also wraps the streams
        sys.stdout, sys.stderr = streams
        code = CLOSED
    except USAGE_ERROR as error:
        code = failed(error.format_message(), USAGE)
    except FailedError as error:
        code = failed(str(error))
    except OSError as error:  # a full disk behind stdout, no more processes: a traceback would not explain it
        code = failed(": ".join(map(str, filter(None, (error.filename, error.strerror or str(error))))))
    except KeyboardInterrupt:  # a second one, while the first was handled
        code = interrupted()
    _drop_the_rest()
    return code


def failed(message: str, code: int = FAILED) -> int:
    """Print one line on stderr, if that is possible, and return the exit code."""
    if sys.stderr is not None:  # print would use stdout instead
        with suppress(OSError):
            print("psgd: " + " ".join(message.splitlines()), file=sys.stderr, flush=True)
    return code


def interrupted() -> int:
    """Exit code that shells expect of a command that was ended by Ctrl-C."""
    return failed("interrupted", INTERRUPTED)


def _flush() -> None:
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise ClosedError from None


def _drop_the_rest() -> None:
    """Discard output that cannot be written, about which the interpreter would complain at its exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, io.UnsupportedOperation):
            try:
                stream.flush()
            except OSError:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, stream.fileno())
                os.close(nothing)


def _nowhere() -> Stream:
    stream = Stream(io.StringIO())
    stream.quiet = True
    return stream


def _plain(value: Any) -> Any:
    """Value for JSON, which has neither infinity nor NaN."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdicts(summary: dict[str, Any]) -> str:
    """Claims of a figure, each on a line that says whether it holds."""
    claims = summary["claims"]
    holding = sum(claim["holds"] for claim in claims)
    lines = [f"{summary['name']}: {summary['title']}: {holding} of {len(claims)} claims hold"]
    for claim in claims:
        verdict = "holds:         " if claim["holds"] else "does not hold: "
        lines.append(f"  {verdict}{claim['text']} ({claim['measured']})")
    return "\n".join(lines)
