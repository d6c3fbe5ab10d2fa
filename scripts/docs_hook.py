"""For MkDocs: pages from outside docs/, links that lead out of them, and scripts from here.

mkdocs.yml names this file. scripts/docs.sh sets RINGCOMM_ASSETS to a folder with the scripts that
draw and search, if it could get them.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # pages of the repository: pages of the site
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "tests/README.md": "tests.md",
}
SOURCES = {target: source for source, target in PAGES.items()}
# Code is left alone, but for the code in the text of a link.
PARTS = re.compile(
    r"^ *```.*?^ *```$|(?P<picture>!?)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
ASSETS = Path(os.environ.get("RINGCOMM_ASSETS", "none"))
MERMAID, WORKER = "assets/mermaid.js", "assets/iframe-worker.js"
# mermaid 11 names arrowheads after the picture. Material's colors are for the old names, and the
# heads would be black on black.
HEADS = """<script>
const initialize = mermaid.initialize;
mermaid.initialize = (options) => initialize({...options, themeCSS: options.themeCSS +
  '[id$="head"] path{fill:var(--md-mermaid-sequence-message-line-color);stroke:none}'});
</script>"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    if (ASSETS / Path(WORKER).name).exists():
        config.extra["polyfills"] = [WORKER]  # where the plugin `offline` would name unpkg.com
    if "MIKE_DOCS_VERSION" in os.environ:  # one of several versions: a menu leads to the others
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(part: re.Match[str]) -> str:
        picture, text, target = part.group("picture", "text", "target")
        if target is None:
            return part.group()
        path, mark, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return part.group()
        there = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        inside = PAGES.get(there, there.removeprefix("docs/"))
        if there in PAGES or there.startswith("docs/"):
            return f"{picture}[{text}]({inside}{mark}{anchor})"
        return f"`{there}`" if there.endswith(text.strip("`/")) else f"{text} (`{there}`)"

    return PARTS.sub(moved, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Say which language it is; and Material loads mermaid from elsewhere, unless it is there."""
    if page.file.src_uri.endswith(".zh.md"):
        output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    if 'class="mermaid"' not in output or not (ASSETS / Path(MERMAID).name).exists():
        return output
    script = f'<script src="{MERMAID}"></script>'
    return output.replace("</head>", f"{script}{HEADS}</head>", 1)


def on_post_build(config: MkDocsConfig) -> None:
    for script in ASSETS.glob("*.js"):
        target = Path(config.site_dir) / "assets" / script.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(script, target)
