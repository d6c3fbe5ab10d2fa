"""Headless Chromium: pages as a reader sees them, as text or as a picture."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
REASON = "no Chromium on the path: pages are not opened"
SECONDS = 60  # guards against hangs


def chromium(page: Path, *arguments: str) -> str:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", "--virtual-time-budget=10000", *arguments]
    done = subprocess.run(
        [*command, page.resolve().as_uri()], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(page: Path) -> str:
    """Return the page's HTML after its scripts have run."""
    return chromium(page, "--dump-dom")


def picture(
    page: Path, to: Path, width: int = 1200, height: int = 2000, dark: bool = False
) -> None:
    """Write the page as a PNG. Chromium's windows are 500 wide at least: others are framed."""
    arguments = [f"--screenshot={to}", f"--window-size={max(width, 500)},{height}"]
    if dark:
        arguments.append("--blink-settings=preferredColorScheme=0")
    if width >= 500:
        chromium(page, *arguments)
        return
    frame = to.with_suffix(".frame.html")
    frame.write_text(
        f'<iframe src="{page.resolve().as_uri()}" width="{width}" height="{height}" '
        'style="border:0"></iframe>'
    )
    try:
        chromium(frame, *arguments)
    finally:
        frame.unlink()


def contrast(front: str, back: str) -> float:
    """Return the contrast of two colors, "#0072b2", as WCAG 2 counts it: from 1 to 21."""

    def lightness(color: str) -> float:
        parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((lightness(front), lightness(back)))
    return (high + 0.05) / (low + 0.05)
