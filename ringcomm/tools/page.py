"""One HTML page with figures, tables and texts, which needs no network.

Figures are plotly's, whose script of megabytes is inlined then, or drawings of figures.js. Colors
follow the reader's choice of light or dark, and figures the width of the window. The palette is
that of all pictures and pages of ringcomm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm.tools import extra, svg

PALETTE = (svg.BLUE, svg.VERMILION, svg.GREEN, svg.PINK, svg.SKY, svg.ORANGE)
COLORS = [light for light, _ in PALETTE]  # these stand out from white and from black
GREY = "#888888"
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
SCALE = "Viridis"  # for heat maps: by lightness alone, from nothing to much
MOST_TICKS = 8  # ranks named at each side of a heat map: they fit into a narrow window
MOST_GAPS = 24  # ranks of which a narrow window has room for gaps between the cells
FOLDER = Path(__file__).parent


def needed() -> None:
    """Raise ValueError where a package is missing that a page needs."""
    extra("jinja2")
    extra("plotly.offline")


def style() -> str:
    """Return the style of a page."""
    own = {"raised": ("#f4f6f8", "#1d2125"), "accent": svg.BLUE, **svg.MEANINGS}
    colors = svg.variables(own, ":root")
    return f"{colors}\n{(FOLDER / 'page.css').read_text(encoding='utf-8')}"


@dataclass
class Page:
    """A page, from top to bottom.

    `title` stands above all, and `lead` is the one sentence that matters most.
    """

    title: str
    lead: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.parts.append({"kind": "heading", "text": text})

    def text(self, text: str) -> None:
        self.parts.append({"kind": "text", "text": text})

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table; columns of numbers stand to the right."""
        numbers = [
            all(isinstance(row[i], (int, float)) or is_number(str(row[i])) for row in rows)
            for i in range(len(columns))
        ]
        cells = [[str(cell) for cell in row] for row in rows]
        self.parts.append({"kind": "table", "columns": columns, "rows": cells, "numbers": numbers})

    def figure(self, figure: Any, caption: str, height: int = 420) -> None:
        """Add a figure: plotly's Figure, or a dict with its data and layout."""
        drawn = json.loads(figure.to_json()) if hasattr(figure, "to_json") else figure
        layout = {**drawn.get("layout", {}), "height": height, "autosize": True}
        layout.pop("template", None)
        part = {"data": drawn["data"], "layout": layout}
        text = inside_script(part)
        self.parts.append({"kind": "figure", "json": text, "caption": caption, "height": height})

    def drawing(self, figure: str, data: dict[str, Any], caption: str) -> None:
        """Add a drawing: the function of that name in figures.js draws the data."""
        text = inside_script({"figure": figure, **data})
        self.parts.append({"kind": "drawing", "json": text, "caption": caption})

    def write(self, path: Path) -> None:
        """Write the page. Raises ValueError where `ringcomm[tools]` is missing, and OSError."""
        jinja = extra("jinja2")
        template = jinja.Environment(autoescape=True).from_string(
            (FOLDER / "page.html").read_text()
        )
        kinds = {part["kind"] for part in self.parts}
        library = extra("plotly.offline").get_plotlyjs() if "figure" in kinds else ""
        drawings = (FOLDER / "figures.js").read_text() if "drawing" in kinds else ""
        path.write_text(
            template.render(
                page=self,
                library=library,
                drawings=drawings,
                style=style(),
                script=(FOLDER / "page.js").read_text(),
            )
        )


def inside_script(data: Any) -> str:
    """Return it as JSON in which a "</script>" in a name does not end the script."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


def is_number(text: str) -> bool:
    """Tell whether it is a number, maybe with a unit: "12.3 µs", "1M", "-"."""
    return text[:1].isdigit() or text in ("", "-")


Cells = Sequence[Sequence[float | None]]


def heat_map(ranks: Sequence[int], values: Cells, sides: tuple[str, str], look: Any) -> Any:
    """Return the figure of a value for each pair of ranks; None leaves a cell empty.

    `sides` say what ranks stand for down and across; `look` has more of plotly's trace.
    """
    names = [str(rank) for rank in ranks]
    gap = int(len(ranks) <= MOST_GAPS)
    trace = {"type": "heatmap", "x": names, "y": names, "z": values, "xgap": gap, "ygap": gap}
    axis: dict[str, Any] = {"type": "category", "showgrid": False, "tickangle": 0}
    axis |= {"tickvals": names[:: math.ceil(len(names) / MOST_TICKS)], "constrain": "domain"}
    down, across = sides
    layout = {
        "xaxis": {**axis, "title": {"text": across}},
        "yaxis": {**axis, "title": {"text": down}, "autorange": "reversed"},
    }
    return {"data": [trace | {"colorscale": SCALE} | look], "layout": layout}


def heat_height(ranks: Sequence[int]) -> int:
    return min(640, max(340, 160 + 14 * len(ranks)))
