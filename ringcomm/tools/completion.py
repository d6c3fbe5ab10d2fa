"""`ringcomm completion`: prints a script that completes `ringcomm` in bash or zsh.

It needs `ringcomm[tools]`, just for printing.
"""

from __future__ import annotations

import argparse

from ringcomm.tools import extra

EXAMPLES = (
    "ringcomm completion bash > ~/.local/share/bash-completion/completions/ringcomm",
    "ringcomm completion zsh > ~/.zfunc/_ringcomm      with fpath+=~/.zfunc in ~/.zshrc",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh"])


def run(options: argparse.Namespace) -> int:
    print(extra("shtab").complete(options.all_commands(), options.shell))
    return 0
