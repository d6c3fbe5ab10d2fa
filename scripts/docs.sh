#!/usr/bin/env bash
# Builds README.md and docs/ as a site, in build/docs/site, which can be read and searched without a
# server. A broken link or anchor is an error.
#   scripts/docs.sh serve              builds it again at each change, and serves it at 127.0.0.1:8000
#   scripts/docs.sh publish VERSION    adds the pages of a version, such as 1.0, to the branch
#                                      gh-pages; RINGCOMM_SITE is the address where they will be
#
# MkDocs lives in an environment of its own, .venv-docs. npm gets the scripts that draw the pictures
# and search: without npm the pages load them from unpkg.com when they are read.
set -euo pipefail
cd "$(dirname "$0")/.."

env=.venv-docs
assets=$PWD/$env/assets

wanted=$(sha256sum <requirements-docs.txt)
if [ "$(cat $env/.requirements 2>/dev/null)" != "$wanted" ]; then
  echo "ringcomm: installing requirements-docs.txt into $env" >&2
  "${PYTHON:-python3}" -m venv $env
  # shellcheck disable=SC2086  # PIP_ARGS holds several words
  $env/bin/python -m pip install -qq --disable-pip-version-check ${PIP_ARGS:-} -r requirements-docs.txt
  echo "$wanted" >$env/.requirements
fi

# from_npm PACKAGE VERSION FILE SHA256
from_npm() {
  local folder target=$assets/$1.js
  [ "$(cat "$target.sum" 2>/dev/null)" = "$4" ] && return
  folder=$(mktemp -d)
  npm pack --silent --pack-destination "$folder" "$1@$2" >/dev/null
  tar -xzf "$folder/$1-$2.tgz" -C "$folder" "package/$3"
  echo "$4  $folder/package/$3" | sha256sum --check --quiet
  mv "$folder/package/$3" "$target"
  rm -r "$folder"
  echo "$4" >"$target.sum"
}

mkdir -p "$assets"
if command -v npm >/dev/null; then
  from_npm mermaid 11.16.0 dist/mermaid.min.js \
    74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b
  from_npm iframe-worker 1.0.4 shim/index.js \
    e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609
else
  echo "ringcomm: no npm here: pictures and the search will need scripts of unpkg.com" >&2
fi
export RINGCOMM_ASSETS=$assets

# publish VERSION: the newest of all versions is also `latest`, to which the site's root leads.
publish() {
  export RINGCOMM_OFFLINE=false PATH=$PWD/$env/bin:$PATH
  local newest alias=() folder
  newest=$( (git show gh-pages:versions.json 2>/dev/null | grep -oP '"version": "\K[^"]+' || true
    echo "$1") | sort -V | tail -1)
  [ "$newest" != "$1" ] || alias=(latest)
  mike deploy --update-aliases "$1" "${alias[@]}"
  [ ${#alias[@]} = 0 ] && return
  mike set-default latest
  # Servers look for these two at the root.
  folder=$(mktemp -d)
  git worktree add -q "$folder" gh-pages
  cp "$folder/$1/404.html" "$folder/$1/sitemap.xml" "$folder/"
  git -C "$folder" add 404.html sitemap.xml
  git -C "$folder" diff --cached --quiet || git -C "$folder" commit -qm "Copy the page for missing ones"
  git worktree remove "$folder"
}

# Material asks at each start to move to its successor, Zensical, which reads mkdocs.yml as well.
export NO_MKDOCS_2_WARNING=1
case "${1:-build}" in
  serve) exec $env/bin/mkdocs serve --strict --dev-addr 127.0.0.1:8000 ;;
  publish)
    publish "${2:?which version, such as 1.0}"
    exit
    ;;
esac
$env/bin/mkdocs build --strict
echo "build/docs/site/index.html"
