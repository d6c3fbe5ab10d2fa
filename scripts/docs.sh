#!/usr/bin/env bash
# Builds README.md and docs/ as a site, in build/docs/site; a broken link or anchor is an error.
# `scripts/docs.sh serve` builds it again at each change, and serves it at 127.0.0.1:8000.
#
# MkDocs lives in an environment of its own, .venv-docs. npm gets mermaid, which draws the pictures:
# without npm the pages load it from unpkg.com when they are read.
set -euo pipefail
cd "$(dirname "$0")/.."

env=.venv-docs
mermaid=11.16.0
sum=74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b

wanted=$(sha256sum <requirements-docs.txt)
if [ "$(cat $env/.requirements 2>/dev/null)" != "$wanted" ]; then
  echo "ringcomm: installing requirements-docs.txt into $env" >&2
  "${PYTHON:-python3}" -m venv $env
  # shellcheck disable=SC2086  # PIP_ARGS holds several words
  $env/bin/python -m pip install -qq --disable-pip-version-check ${PIP_ARGS:-} -r requirements-docs.txt
  echo "$wanted" >$env/.requirements
fi

script=$PWD/$env/mermaid-$mermaid.min.js
if ! [ -e "$script" ] && command -v npm >/dev/null; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  npm pack --silent --pack-destination "$folder" mermaid@$mermaid >/dev/null
  tar -xzf "$folder/mermaid-$mermaid.tgz" -C "$folder" package/dist/mermaid.min.js
  echo "$sum  $folder/package/dist/mermaid.min.js" | sha256sum --check --quiet
  mv "$folder/package/dist/mermaid.min.js" "$script"
fi
if [ -e "$script" ]; then
  export RINGCOMM_MERMAID=$script
else
  echo "ringcomm: no npm here: pictures will be drawn by a script of unpkg.com" >&2
fi

# Material asks at each start to move to its successor, Zensical, which reads mkdocs.yml as well.
export NO_MKDOCS_2_WARNING=1
if [ "${1:-build}" = serve ]; then
  exec $env/bin/mkdocs serve --strict --dev-addr 127.0.0.1:8000
fi
$env/bin/mkdocs build --strict
echo "build/docs/site/index.html"
