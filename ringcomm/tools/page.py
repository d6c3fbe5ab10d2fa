"""One HTML page with figures, tables and texts, which needs no network.

plotly's script is inlined. Colours follow the reader's choice of light or dark, and figures the
width of the window. The series have the colours of Okabe and Ito, which everybody tells apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm.tools import extra

# Of Okabe and Ito, those that stand out from white and from black.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
# Of heat maps, by lightness alone: from nothing to much.
SCALE = "Viridis"
FOLDER = Path(__file__).parent


def needed() -> None:
    """Raise ValueError where a package is missing that a page needs."""
    extra("jinja2")
    extra("plotly.offline")


@dataclass
class Page:
    """What a page shows, from top to bottom.

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
        # A "</script>" in a name must not end the script.
        text = json.dumps(part).replace("</", "<\\/")
        self.parts.append({"kind": "figure", "json": text, "caption": caption, "height": height})

    def write(self, path: Path) -> None:
        """Write the page. Raises ValueError where `ringcomm[tools]` is missing, and OSError."""
        jinja = extra("jinja2")
        template = jinja.Environment(autoescape=True).from_string(
            (FOLDER / "page.html").read_text()
        )
        has_figures = any(part["kind"] == "figure" for part in self.parts)
        library = extra("plotly.offline").get_plotlyjs() if has_figures else ""
        path.write_text(
            template.render(
                page=self,
                library=library,
                style=(FOLDER / "page.css").read_text(),
                script=(FOLDER / "page.js").read_text(),
            )
        )


def is_number(text: str) -> bool:
    """Tell whether it is a number, maybe with a unit: "12.3 µs", "1M", "-"."""
    return text[:1].isdigit() or text in ("", "-")
