"""Everything that a machine with one NVIDIA GPU can tell about ringcomm, in one archive.

    python benchmarks/gpu_check.py --list                 # the stages, in their order
    python benchmarks/gpu_check.py --call 1 --out DIR     # the first of three calls of 8 minutes
    python benchmarks/gpu_check.py --minutes 9 --out DIR  # what fits, in the order of the calls
    python benchmarks/gpu_check.py --ranks 4 --only torch,plans
    python benchmarks/gpu_check.py --node --minutes 9     # ranks with a GPU each, NCCL beside
    python benchmarks/gpu_check.py --simulated --short    # no GPU: do all stages work?

Without a GPU the stages run on the simulated device of the tests, where figures mean nothing and
are not judged. README.md says how to check a machine, and what the stages do: "On a GPU".
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import gpu.build
import gpu.running
import gpu.stages
import gpu.table
import torch
from gpu.archive import Archive
from gpu.ranks import NODE
from gpu.running import Outcome
from gpu.stages import RANKS, ROOT, STAGES, Settings, Stage

from lab import machine, words

SIMULATED = ROOT / "build" / "tests" / "libringcomm_sim.so"
LAST_SECONDS = 8.0  # within --minutes, to end a stage and to write the archive
AT_ONCE = 8  # stages of --short


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    kinds = ", ".join(dict.fromkeys(stage.kind for stage in STAGES))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    names = words.list_of(str)
    add("--only", type=names, default=[], metavar="NAMES", help=f"{kinds}; or as plans-4")
    add("--without", type=names, default=[], metavar="NAMES", help="leave these out")
    add("--call", type=int, choices=gpu.stages.CALLS, help="a third of what one GPU can tell")
    add("--ranks", type=words.list_of(words.positive), help="2,4,8,16, or some of them")
    add("--minutes", type=float, metavar="N", help="run what fits, and end in time")
    add("--node", action="store_true", help="a GPU a rank: 2 ranks, and as many as there are GPUs")
    add("--list", action="store_true", help="show the stages that would run, in their order")
    add("--out", type=Path, default=ROOT / "build" / "gpu_check", metavar="DIR", help="archive")
    add("--simulated", action="store_true", help="use the simulated device also where a GPU is")
    add("--short", action="store_true", help="simulated: the least of each stage, side by side")
    add("--no-build", action="store_true", help="use the ringcomm that is installed")
    add("--library", default="", metavar="PATH", help="a libringcomm_cuda.so, where nvcc is not")
    add("--probe", default="", metavar="PATH", help="a compiled gpu/probe.cu, where nvcc is not")
    for hidden in ("--stage", "--settings", "--rows"):
        add(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if wrong := gpu.stages.unknown([*options.only, *options.without]):
        parser.error(f"there is no stage {wrong[0]!r}: choose from {kinds}")
    if wrong := sorted(set(options.ranks or []) - set(RANKS)):
        parser.error(f"there is no stage for {wrong[0]} ranks: choose from {RANKS}")
    if options.call:
        options.only = options.only or gpu.stages.of_call(options.call)
        options.minutes = options.minutes or gpu.stages.CALL_MINUTES
    if options.node:
        os.environ[NODE] = "1"
        most = max(2, torch.cuda.device_count())
        options.ranks = options.ranks or [2, max(ranks for ranks in RANKS if ranks <= most)]
        options.only = options.only or gpu.stages.OF_NODES
    else:  # asked for by name, they run
        options.without += [k for k in gpu.stages.ONLY_NODES if not named(k, options.only)]
    return options


def named(kind: str, only: list[str]) -> bool:
    return any(name.partition("-")[0] == kind for name in only)


def settings_of(options: argparse.Namespace, folder: Path) -> Settings:
    """Look what is there. Ends the program where there is neither a GPU nor a simulated one."""
    simulated = options.simulated or not torch.cuda.is_available()
    library = options.library
    if simulated:
        library = os.environ.pop("RINGCOMM_CUDA_LIBRARY", "") or str(SIMULATED)
        if not Path(library).exists():
            sys.exit(
                f"gpu_check.py: torch {torch.__version__} finds no GPU here, and there is no "
                f"simulated one at {library}: build it by `scripts/build.sh tests`"
            )
    return Settings(
        simulated=simulated,
        short=options.short,
        library=str(Path(library).resolve()) if library else "",
        probe=str(Path(options.probe).resolve()) if options.probe else "",
        build=not simulated and not options.no_build,
        folder=str(folder),
    )


def stages_of(options: argparse.Namespace, settings: Settings) -> list[Stage]:
    """Return the stages to run, in order. Those that build come first."""
    ranks: list[int] = options.ranks or settings.pick(RANKS, [2, 4], [2])
    stages = gpu.stages.chosen(options.only, options.without, ranks)
    build = gpu.stages.by_name("build")
    if not settings.build:
        stages = [stage for stage in stages if stage != build]
    elif not gpu.build.built() and build not in stages:
        stages = sorted([build, *stages], key=STAGES.index)
    return stages


def listing(stages: list[Stage], minutes: float | None) -> str:
    """Return the stages as a table, with what is left out when time is short."""
    fit, _ = gpu.stages.fitting(stages, 60 * minutes - LAST_SECONDS if minutes else float("inf"))
    lines = ["stage          seconds  decides"]
    for stage in stages:
        late = "" if stage in fit else "  (does not fit)"
        lines.append(f"{stage.name:13}  {stage.seconds:7}  {stage.decides}{late}")
    total = sum(stage.seconds for stage in fit)
    lines.append(f"{len(fit)} of {len(stages)} stages, {total / 60:.0f} minutes")
    return "\n".join(lines)


def running_since() -> float:
    """Return the time.monotonic() at which this process began: importing torch takes its time."""
    ticks = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - min(max(0.0, age), 300.0)


def use_what_was_built() -> None:
    """Have the stages that follow import it."""
    if package := gpu.build.built():
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(package) not in known:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(package), *filter(None, known)])


def run(options: argparse.Namespace, folder: Path) -> int:
    settings = settings_of(options, folder)
    stages = stages_of(options, settings)
    os.environ["OMP_NUM_THREADS"] = "1"
    known = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # Absolute: some of what is started runs in another folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in known)
    end = running_since() + 60 * options.minutes - LAST_SECONDS if options.minutes else None
    at_once = AT_ONCE if settings.simulated and settings.short else 1
    facts = machine.machine() | gpu.build.gpu_facts(settings.simulated)
    archive, outcomes = Archive(options.out, folder), list[Outcome]()
    if settings.build:
        use_what_was_built()
    for outcome in gpu.running.run_stages(stages, settings, end, at_once):
        outcomes.append(outcome)
        if outcome.left_out:
            print(f"{outcome.stage.name}: {outcome.status}", flush=True)
        else:
            print(f"{outcome.stage.name}: {outcome.seconds:.1f} s, ", end="")
            print(gpu.table.summary(outcome.rows), flush=True)
        if settings.build and outcome.stage.name == "build":
            use_what_was_built()
        archive.write(outcomes, facts)  # also if we are ended ourselves
    rows = [row for outcome in outcomes for row in outcome.rows]
    print("\n" + archive.write(outcomes, facts))
    print(f"{gpu.table.summary(rows)}; all of it is in {archive.path}")
    return 1 if any(row.verdict == gpu.table.FAIL for row in rows) else 0


def main() -> int:
    options = parse()
    if options.stage:
        settings = Settings(**json.loads(options.settings))
        gpu.stages.run_here(options.stage, settings, Path(options.rows))
        return 0
    if options.list:
        without = [*options.without, *(["build"] if options.no_build else [])]
        stages = gpu.stages.chosen(options.only, without, options.ranks or RANKS)
        print(listing(stages, options.minutes))
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    try:
        return run(options, folder)
    except KeyboardInterrupt:
        return 130  # as shells have it
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
