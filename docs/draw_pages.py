"""Draws docs/pictures/: `python docs/draw_pages.py [NAME ...]`.

Each function below draws the picture of its name; without names all are drawn. `--to FOLDER` takes
another folder. Those of `trace` and `top` show records of jobs that never ran, `bench` a committed
run, and `doctor` what it finds on this host.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from lab.devtools import Browser  # noqa: E402
from lab.flights import BEGIN, MS, training, write  # noqa: E402
from ringcomm.__main__ import main as ringcomm  # noqa: E402
from ringcomm._flight.records import read_folder  # noqa: E402
from ringcomm.tools import extra, svg  # noqa: E402
from ringcomm.tools import top as screens  # noqa: E402
from ringcomm.tools.bench import collectives, figures  # noqa: E402
from ringcomm.tools.trace import job_of  # noqa: E402
from ringcomm.tools.trace.analysis import analyse  # noqa: E402
from ringcomm.tools.trace.html import write_page  # noqa: E402

RUN = DOCS.parent / "benchmarks" / "results" / "2-cores-all-collectives.json"
WIDTH = 1200  # pixels of a page
WIDE = 120  # columns of a terminal
# Rich's pictures ask a server for their font; the reader's own will do.
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def photograph(page: Path, to: Path, last: str = "figure:last-of-type") -> None:
    """Write a page as a PNG, in light colors, down to its last figure."""
    with Browser() as browser:
        light = {"name": "prefers-color-scheme", "value": "light"}
        browser.ask("Emulation.setEmulatedMedia", features=[light])
        size = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.ask("Emulation.setDeviceMetricsOverride", **size)
        browser.open(page.as_uri())
        browser.wait_for("[...document.querySelectorAll('.plot')].every(one => one.data)")
        browser.run("document.querySelectorAll('.modebar').forEach((one) => one.remove())")
        places = f"[...document.querySelectorAll({last!r})]"
        height = browser.run(f"{places}.at(-1).getBoundingClientRect().bottom + scrollY + 16")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        shot = browser.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    to.write_bytes(base64.b64decode(shot["data"]))


def trace(folder: Path, to: Path) -> None:
    """Photograph `ringcomm trace --html` of eight ranks on two hosts, of which rank 5 is slow."""
    flights, _ = training(8, steps=40, hosts=2, slow=5)
    job = job_of(read_folder(write(folder / "records", flights)))
    write_page(job, analyse(job), folder / "page.html")
    photograph(folder / "page.html", to / "trace.png")


def top(folder: Path, to: Path) -> None:
    """Draw `ringcomm top`: of eight ranks, rank 7 has not called what the others wait in."""
    looks = []
    for steps, after in ((75, 0), (140, 5000 * MS)):
        flights, now = training(8, steps=steps, hosts=2)
        for flight in flights:
            flight.clock.error = 0
            if after and flight.rank != 7:
                flight.call("all_reduce", now, elements=500_000)
        at = (BEGIN + now + after) * 1e-9
        looks.append(screens.look(write(folder, flights), at))
    screen = extra("rich.console").Console(width=WIDE, record=True, file=io.StringIO())
    before, after_it = looks
    title = screens.title_of(Path("records"), after_it)
    screen.print(screens.table(before, after_it, title, screens.View(WIDE)))
    text = screen.export_svg(title="ringcomm top records/", unique_id="top")
    text = FONT_FACE.sub("", text).replace("Fira Code, monospace", "monospace")
    (to / "top.svg").write_text(text)


def bench(folder: Path, to: Path) -> None:
    """Photograph the report of the committed run of all collectives; nothing is measured again."""
    page = folder / "page.html"
    figures.write(page, collectives.NAME, json.loads(RUN.read_text()))
    photograph(page, to / "bench.png", "figure:nth-of-type(-n + 3)")


def doctor(folder: Path, to: Path) -> None:
    """Photograph what four ranks of this host find."""
    page = folder / "page.html"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    words = ("-m", "ringcomm", "doctor", "--wait", "60", "--html", str(page))
    subprocess.run((*launcher, *words), check=False)  # 1: something is bad
    photograph(page, to / "doctor.png")


STACKS = """thread MainThread:
  File "/home/me/train.py", line 58, in <module>
  File "/home/me/train.py", line 31, in load_batch
"""
HANG = [  # a prompt and what is typed, or lines that appear; and seconds before it
    ("$ torchrun --standalone --nproc-per-node=4 train.py", 0.5),
    ("step 10  loss 1.92", 1.0),
    ("step 20  loss 1.34", 1.0),
    ("ringcomm WARNING rank 0 of group '0': all_reduce #21 …: has waited 10 s for rank 2", 2.0),
    ("(alive, …, has not called #21; pid 1002 on node0); … run `ringcomm trace` there", 0.0),
    ("$ ringcomm trace", 2.0),
]
SHOWN, ROW, COLUMN, LEFT = 14.0, 20, 8.5, 16  # seconds of the whole, and pixels


def hang(folder: Path, to: Path) -> None:
    """Draw a terminal in which a job hangs, and `ringcomm trace` says where; it moves."""
    flights, now = training(4)
    for flight in flights:
        if flight.rank != 2:
            flight.call("all_reduce", now, elements=500_000)
    write(folder, flights)
    (ring,) = folder.glob("rank2-*")
    ring.with_name(ring.stem.rpartition("-")[0] + ".stacks").write_text(STACKS)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ringcomm(["trace", str(folder)])
    first, *table = said.getvalue().splitlines()[:6]
    answer = [*textwrap.wrap(first, WIDE - 10), *table]
    lines = [*HANG, *((line, 1.0 if line == answer[0] else 0.0) for line in answer)]
    parts, at = [], 0.0
    for number, (line, pause) in enumerate(lines):
        at += pause
        css = "typed" if line.startswith("$") else "answer" if line in answer[:-5] else "line"
        text = svg.text(LEFT, 28 + ROW * number, line, css).replace(
            "<text ", f'<text xml:space="preserve" style="animation-name: at{number}" ', 1
        )
        begin = 100 * at / SHOWN
        parts.append(
            f"<style>@keyframes at{number} {{ 0%, {begin:.1f}% {{ opacity: 0; }} "
            f"{begin + 0.1:.1f}%, 100% {{ opacity: 1; }} }}</style>{text}"
        )
    rules = (
        "text { font: 13px ui-monospace, monospace; white-space: pre; }",
        f"text {{ animation-duration: {SHOWN:g}s; animation-iteration-count: infinite; }}",
        ".typed { font-weight: 700; }",
        ".answer { fill: var(--blame); font-weight: 700; }",
    )
    still = "@media (prefers-reduced-motion: reduce) { svg text { animation: none; } }"
    colors = svg.style({"blame": svg.VERMILION}, rules)
    width, height = LEFT * 2 + COLUMN * max(len(line) for line, _ in lines), 40 + ROW * len(lines)
    title = "A job hangs, and ringcomm trace names the rank, the file and the line"
    (to / "hang.svg").write_text(svg.picture(title, width, height, f"{colors}\n{still}", parts))


DRAWN: dict[str, Callable[[Path, Path], None]] = {
    "hang": hang,
    "trace": trace,
    "top": top,
    "bench": bench,
    "doctor": doctor,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="draw the pictures of the pages")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWN)}")
    parser.add_argument("--to", type=Path, default=DOCS / "pictures", help="the folder")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in DRAWN]
    if unknown:
        parser.error(f"no picture {unknown[0]}: there are {', '.join(DRAWN)}")
    os.environ["TZ"] = "UTC"  # the pictures show times
    time.tzset()
    options.to.mkdir(exist_ok=True)
    for name in options.names or DRAWN:
        with tempfile.TemporaryDirectory() as folder:
            DRAWN[name](Path(folder), options.to)


if __name__ == "__main__":
    main()
