"""``psgd bench``: costs and gains of PSGD compared with other optimizers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ... import __version__
from ...bench import BENCHMARKS, benchmark
from ...bench import peers as bench_peers
from .. import arguments
from ..output import Json, Output, Quiet, interrupted


def bench(
    benchmarks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BENCHMARK", help=f"Benchmarks to run: {', '.join(BENCHMARKS)}, or all.", show_default="all"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Device to measure on: cpu or cuda.")
    ] = "cpu",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Optimizers to compare with: names or packages, separated by commas; or all or none.",
            show_default="all",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--size",
            metavar="NAME",
            help="Model to measure, for benchmarks that have several models; for lm small, 52m or 124m.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, for a first look.")] = False,
    limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1, help="Time limit of each measurement.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text file that the language model is trained on.",
            show_default="source code of the Python installation",
        ),
    ] = None,
    rates: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=7, help="lm: learning rates of each optimizer.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=3, help="lm: seeds of the results; 0 only tunes.")
    ] = None,
    default_seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=3, help="lm: seeds of the results with default settings.", show_default="--seeds"
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="lm: steps of a run.")] = None,
    tuning_steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="lm: steps of a run that tunes.", show_default="--steps"),
    ] = None,
    total: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="lm, defaults: time for all runs. Those that would end later are left to another call with the same "
            "folder.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="defaults: measurements at the same time.", show_default="1"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder that the results are written to.")] = Path("bench"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure costs and gains of PSGD compared with other optimizers.

    Each benchmark gives a table, a JSON file and a plot. Every measurement has its own process and a time limit. A
    measurement that fails is listed as failed, and the others continue. Ctrl-C ends the present measurement; the table
    then has the measurements before it.

    lm and defaults keep every finished run in the folder of the results, under runs. Another call with the same folder
    does not repeat it. For lm, --peers may name PSGD or PSGD-bf16, and then only the named optimizers are run.

    \b
    Examples:
      psgd bench dense --quick
      psgd bench step --device cuda --peers AdamW,Muon
      psgd bench fit --json --quiet | jq '.benchmarks[].table'
      psgd bench lm --size 52m --device cuda --peers AdamW,Muon --total 540
      psgd bench defaults --jobs 8 --total 540
    """
    wanted = [BENCHMARKS[name] for name in arguments.names(benchmarks or ["all"], BENCHMARKS, "'BENCHMARK'")]
    arguments.check_device(device)
    effort = benchmark.Effort(rates, seeds, default_seeds, steps, tuning_steps)
    for option, value in {**vars(effort), "total": total, "jobs": jobs}.items():
        if value is not None and not any(option in one.parts for one in wanted):
            right = (
                f"{wanted[0].name} has no such option"
                if wanted[0].parts
                else f"{wanted[0].name} cannot be run in parts"
            )
            raise typer.BadParameter(right, param_hint=f"'--{option.replace('_', '-')}'")
    comparable = [name for name in bench_peers.KNOWN if any(name in one.peers for one in wanted)]
    if peers is not None and not comparable:
        raise typer.BadParameter(f"{wanted[0].name} compares with no others", param_hint="'--peers'")
    try:
        chosen = bench_peers.chosen(peers, comparable) if peers is not None else bench_peers.chosen("all")
    except bench_peers.UnknownPeerError as error:
        raise typer.BadParameter(str(error), param_hint="'--peers'") from None
    models = [name for one in wanted for name in one.models]
    if model is not None and model not in models:
        right = f"{model!r} is none of {', '.join(models)}" if models else f"{wanted[0].name} has no choice of models"
        raise typer.BadParameter(right, param_hint="'--model'")
    if text is not None and not text.is_file():
        raise typer.BadParameter(f"{text} is not a file", param_hint="'--text'")
    printer = Output(as_json=as_json, quiet=quiet)
    with arguments.writing(out):
        arguments.try_writing(out)
    until = None if total is None else time.time() + total
    summaries = []
    for one in wanted:
        among = [peer for peer in chosen if peer.name in one.peers]
        plan = benchmark.Plan(device, among, model if model in one.models else None, quick, limit, text)
        if one.parts:
            understood = {name: value for name, value in vars(effort).items() if name in one.parts}
            plan = replace(plan, effort=benchmark.Effort(**understood), runs=out / "runs", until=until)
        if "jobs" in one.parts:
            plan = replace(plan, jobs=jobs or 1)
        outcomes = benchmark.run(one, plan, printer.progress)
        benchmark.show(one, outcomes, printer.results)
        with arguments.saving(out):
            paths = benchmark.write(one, plan, outcomes, out)
        printer.results.say(f"Results: {', '.join(map(str, paths))}")
        summaries.append({**benchmark.summary(one, plan, outcomes), "files": [str(path) for path in paths]})
        if not summaries[-1]["complete"]:
            break
    printer.document({"benchmarks": summaries, "version": __version__})
    if not summaries[-1]["complete"]:
        raise typer.Exit(interrupted())
