"""Parts that all pictures share: the file around them, colors for light and dark, texts and marks.

A picture follows the reader's choice of light or dark. Its colors are variables of CSS, so each is
a pair: for a light ground, and for a dark one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

Pair = tuple[str, str]

GROUNDS = {
    "ground": ("#ffffff", "#14171a"),
    "ink": ("#1b1f24", "#e6e9ec"),
    "soft": ("#5b6470", "#9aa4af"),
    "line": ("#d5dae0", "#343a41"),
}
# The colors of Okabe and Ito, which everybody tells apart, and two more.
BLUE, ORANGE, VERMILION = ("#0072b2", "#56b4e9"), ("#e69f00", "#f0b432"), ("#d55e00", "#f47f3c")
GREEN, PINK, SKY = ("#009e73", "#2fc79a"), ("#cc79a7", "#e19fc4"), ("#56b4e9", "#8fd3ff")
BROWN, PURPLE = ("#8a6d3b", "#c9a66b"), ("#6a51a3", "#a58fe0")
# One color for one thing everywhere: in plans over time, and in records of jobs.
MEANINGS: dict[str, Pair] = {
    "moves": BLUE,  # bytes
    "adds": GREEN,
    "waits": ("#b87400", "#f0b432"),
    "queued": ("#8a939d", "#79838d"),
    "wrong": VERMILION,  # failed, or not ended
    "credit": PINK,
}
RULES = (
    ".ground { fill: var(--ground); }",
    "text { fill: var(--ink); }",
    ".title { font-size: 15px; font-weight: 600; }",
    ".panel { font-size: 13px; font-weight: 600; }",
    ".soft { fill: var(--soft); }",
    ".grid { stroke: var(--line); }",
    ".outlined { paint-order: stroke; stroke: var(--ground); stroke-width: 3px; }",
)


def variables(colors: Mapping[str, Pair], scope: str) -> str:
    """Return the rules of CSS that give each color its `--name`, for light and for dark grounds."""
    light, dark = (
        " ".join(f"--{name}: {pair[way]};" for name, pair in {**GROUNDS, **colors}.items())
        for way in (0, 1)
    )
    return (
        f"{scope} {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ {scope} {{ {dark} }} }}"
    )


def style(colors: Mapping[str, Pair], rules: Iterable[str], scope: str = "svg") -> str:
    """Return the style of pictures that `scope` selects: `--name` for each color, and the rules."""
    return "\n".join(
        (
            variables(colors, scope),
            f"{scope} {{ background: var(--ground); font: 12px system-ui, sans-serif; }}",
            f"{scope} {{ max-width: 100%; height: auto; }}",  # no wider than its page
            *(f"{scope} {rule}" for rule in (*RULES, *rules)),
        )
    )


def picture(
    title: str, width: float, height: float, styled: str, parts: Iterable[str], more: str = ""
) -> str:
    """Return the file of a picture; `more` are attributes of the whole."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"{more}>',
            f"<title>{escape(title, quote=False)}</title><style>\n{styled}\n</style>",
            f'<rect class="ground" width="{width:g}" height="{height:g}"/>',
            *parts,
            "</svg>\n",
        )
    )


def near(value: float) -> str:
    """Return a length to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, css: str = "", anchor: str = "") -> str:
    """Return a line of text; `anchor` is "middle" or "end" where x is not its beginning."""
    more = (f' class="{css}"' if css else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text{more} x="{near(x)}" y="{near(y)}">{escape(words, quote=False)}</text>'


def _mark(tag: str, css: str, more: str, title: str) -> str:
    named = f'class="{css}" ' if css else ""
    end = f"><title>{escape(title, quote=False)}</title></{tag}>" if title else "/>"
    return f"<{tag} {named}{more}{end}"


def box(
    x: float, y: float, width: float, height: float, css: str = "", *, fill: str = "",
    title: str = "", more: str = "",
) -> str:  # fmt: skip
    """Return a rectangle; `fill` is the name of a color, and the title shows at the pointer."""
    place = f'x="{near(x)}" y="{near(y)}" width="{near(width)}" height="{near(height)}"'
    filled = f' style="fill: var(--{fill})"' if fill else ""
    return _mark("rect", css, place + filled + more, title)


def path(d: str, css: str = "", *, stroke: str = "", title: str = "", more: str = "") -> str:
    """Return a line; `stroke` is the name of a color."""
    stroked = f' style="stroke: var(--{stroke})"' if stroke else ""
    return _mark("path", css, f'd="{d}"{stroked}{more}', title)
