"""What all commands have in common: results and nothing else on stdout, one line for an error, and the exit codes."""

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

#: exit codes: it failed on its way; it could not begin; Ctrl-C; and, as shells have it, nobody reads its output
FAILED, USAGE, INTERRUPTED, CLOSED = 1, 2, 130, 141

#: what typer raises for a wrong option, argument or command; it has no public name in typer
USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

Json = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON document on stdout, and progress on stderr.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only, not how far it is.")]


class FailedError(Exception):
    """A command cannot go on, for a reason that is no bug; the message is for people."""


class ClosedError(Exception):
    """Nobody reads what is printed, as after ``psgd … | head``."""


class Stream(Console):
    """Prints texts as they are. Control characters go to terminals alone, whatever rich makes of the environment."""

    def __init__(self, file: TextIO | None = None, *, stderr: bool = False) -> None:
        target = file or (sys.stderr if stderr else sys.stdout)
        terminal = target is not None and target.isatty()
        # a table that is piped is not cut to the width of a terminal
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
        """One line, however long."""
        self.print(str(text), soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise ClosedError


class Output:
    """Where a command tells how far it is, and where it says what came out.

    Args:
        as_json: the result is one JSON document on stdout, and progress goes to stderr
        quiet: progress goes nowhere
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        people = Stream()
        #: for people; with ``as_json`` nowhere
        self.results = _nowhere() if as_json else people
        #: the same object where both go to stdout, so that results do not run into the bars
        self.progress = _nowhere() if quiet else Stream(stderr=True) if as_json else people

    def document(self, content: Mapping[str, Any]) -> None:
        """For programs: all of the result at once, and only where it was asked for."""
        if self.as_json:
            text = json.dumps(_plain(content), indent=1, allow_nan=False)
            try:
                print(text, flush=True)
            except BrokenPipeError:
                raise ClosedError from None


class Commands(TyperGroup):
    """Answers Ctrl-C; what typer itself makes of it depends on its version."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None


def run(app: typer.Typer, args: Sequence[str] | None) -> int:
    """Run a command and return its exit code. What is no bug of ours never ends in a traceback."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some terminals have no Greek
    try:
        code = int(app(args, prog_name="psgd", standalone_mode=False) or 0)
        _flush()  # now, where a failure can be told, and not while the interpreter ends
    except ClosedError:
        code = CLOSED
    except SystemExit:  # typer's own answer to a closed pipe, for which it also wraps the streams
        sys.stdout, sys.stderr = streams
        code = CLOSED
    except USAGE_ERROR as error:
        code = failed(error.format_message(), USAGE)
    except FailedError as error:
        code = failed(str(error))
    except OSError as error:  # a full disk behind stdout, no more processes: nothing that a traceback would explain
        code = failed(": ".join(map(str, filter(None, (error.filename, error.strerror or str(error))))))
    except KeyboardInterrupt:  # a second one, while the first was answered
        code = interrupted()
    _drop_the_rest()
    return code


def failed(message: str, code: int = FAILED) -> int:
    """Say so in one line on stderr, if anybody reads that."""
    if sys.stderr is not None:  # print would take stdout instead
        with suppress(OSError):
            print("psgd: " + " ".join(message.splitlines()), file=sys.stderr, flush=True)
    return code


def interrupted() -> int:
    """The exit code that shells expect of a command that was ended by Ctrl-C."""
    return failed("interrupted", INTERRUPTED)


def _flush() -> None:
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise ClosedError from None


def _drop_the_rest() -> None:
    """What a stream does not take, the interpreter would complain about at its end."""
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
    """JSON has no infinity, and no number that is none."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
