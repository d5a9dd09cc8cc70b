#!/bin/sh
# pages.sh PYTHON: writes the pages that are made from the code, and fails where that changed one.
set -eu
python=$1
git rev-parse --git-dir >/dev/null 2>&1 || { echo "== an unpacked archive: pages are not compared"; exit 0; }
before=$(git diff | cksum)
for page in configuration_page module_list agent_pages speed_page badges explained loop; do
    "$python" ".ci/write_$page.py"
done
if [ "$(git diff | cksum)" != "$before" ]; then
    git --no-pager diff --stat >&2
    echo "hint: a page was out of date; it is written now: look at it and commit it" >&2
    exit 1
fi
echo "== all pages are up to date"
