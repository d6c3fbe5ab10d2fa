"""Everything that a machine with one NVIDIA GPU can tell about ringcomm, in one table.

    python benchmarks/gpu_check.py                      # all stages, in groups of 9 minutes
    python benchmarks/gpu_check.py --group 1            # the build and the probe
    python benchmarks/gpu_check.py --only bandwidth,ddp
    python benchmarks/gpu_check.py --simulated --short  # no GPU: do all stages work?

Writes table.txt, table.md and table.json. Without a GPU the stages run on the simulated device of
the tests, where figures mean nothing and are not judged. See README.md, "On a GPU".
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import gpu.build
import gpu.stages
import gpu.table
import torch
from gpu.stages import ROOT, STAGES, Outcome, Settings

from lab import report

SIMULATED = ROOT / "build" / "tests" / "libringcomm_sim.so"
GROUP_SECONDS = 540.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="stages: " + "; ".join(f"{s.name} (group {s.group}): {s.about}" for s in STAGES),
    )
    add = parser.add_argument
    add("--only", type=report.list_of(str), help="stages, by name: " + ", ".join(names))
    add("--group", type=int, choices=sorted({stage.group for stage in STAGES}))
    add("--out", type=Path, default=ROOT / "build" / "gpu_check" / "out", metavar="DIR")
    add("--simulated", action="store_true", help="use the simulated device also where a GPU is")
    add("--short", action="store_true", help="simulated: the least of each stage, side by side")
    add("--no-build", action="store_true", help="use the ringcomm that is installed")
    add("--library", default="", metavar="PATH", help="a libringcomm_cuda.so, where nvcc is not")
    add("--probe", default="", metavar="PATH", help="a compiled gpu/probe.cu, where nvcc is not")
    add("--seconds", type=float, default=GROUP_SECONDS, help="for a group's stages together")
    for hidden in ("--stage", "--settings", "--rows"):
        add(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.only or []) - set(names):
        parser.error(f"there is no stage {sorted(unknown)[0]!r}: choose from {', '.join(names)}")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
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
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return Settings(
        simulated=simulated,
        short=options.short,
        library=str(Path(library).resolve()) if library else "",
        probe=str(Path(options.probe).resolve()) if options.probe else "",
        build=not simulated and not options.no_build,
        folder=str(folder),
    )


def chosen(options: argparse.Namespace, settings: Settings) -> list[list[gpu.stages.Stage]]:
    """Return the stages to run, group by group. What has to be built is built first."""
    stages = [
        stage
        for stage in STAGES
        if (not options.only or stage.name in options.only)
        and (options.group is None or stage.group == options.group)
    ]
    numbers = sorted({stage.group for stage in stages})
    groups = [[stage for stage in stages if stage.group == number] for number in numbers]
    build = gpu.stages.by_name("build")
    if settings.build and not gpu.build.built() and build not in stages:
        groups[0].insert(0, build)
    return groups


def use_what_was_built() -> None:
    """Have the stages that follow import it."""
    if package := gpu.build.built():
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(package) not in known:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(package), *filter(None, known)])


def write(folder: Path, outcomes: list[Outcome], facts: dict[str, Any]) -> str:
    """Write the table in its three forms; returns it as text."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    text = gpu.table.to_text(rows)
    (folder / "table.txt").write_text(text, encoding="utf-8")
    (folder / "table.md").write_text(gpu.table.to_markdown(rows, facts), encoding="utf-8")
    stages = [outcome.facts() for outcome in outcomes]
    (folder / "table.json").write_text(gpu.table.to_json(rows, facts, stages), encoding="utf-8")
    return text


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    os.environ["OMP_NUM_THREADS"] = "1"
    known = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # Absolute: some of what is started runs in another folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in known)
    facts = report.machine() | gpu.build.gpu_facts(settings.simulated)
    outcomes: list[Outcome] = []
    at_once = len(STAGES) if settings.simulated and settings.short else 1
    for stages in chosen(options, settings):
        if settings.build:
            use_what_was_built()
        for outcome in gpu.stages.run_stages(stages, settings, options.seconds, at_once):
            outcomes.append(outcome)
            print(f"{outcome.stage.name}: {outcome.seconds:.1f} s, ", end="")
            print(gpu.table.summary(outcome.rows), flush=True)
            if settings.build and outcome.stage.name == "build":
                use_what_was_built()
            write(Path(settings.folder), outcomes, facts)  # also if we are ended ourselves
    outcomes.sort(key=lambda outcome: STAGES.index(outcome.stage))
    rows = [row for outcome in outcomes for row in outcome.rows]
    print("\n" + write(Path(settings.folder), outcomes, facts))
    print(f"{gpu.table.summary(rows)}; also in {settings.folder}")
    return 1 if any(row.verdict == gpu.table.FAIL for row in rows) else 0


def main() -> int:
    options = parse()
    if options.stage:
        settings = Settings(**json.loads(options.settings))
        gpu.stages.run_here(options.stage, settings, Path(options.rows))
        return 0
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130  # as shells have it


if __name__ == "__main__":
    sys.exit(main())
