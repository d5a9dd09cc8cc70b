#!/bin/sh
# Refuses files over 500 KB that git tracks, or would add, unless they are listed here: a wheel was committed once.
set -eu
allowed=""
limit_kb=500
git rev-parse --git-dir >/dev/null 2>&1 || exit 0 # an unpacked archive

found=$(git ls-files --cached --others --exclude-standard | while IFS= read -r path; do
    [ -f "$path" ] || continue
    size_kb=$(($(wc -c <"$path") / 1000))
    case " $allowed " in *" $path "*) continue ;; esac
    [ "$size_kb" -le "$limit_kb" ] || echo "$path has $size_kb KB, at most $limit_kb are allowed"
done)
[ -z "$found" ] && exit 0
echo "$found" >&2
echo "hint: remove it, ignore it in .gitignore, or list it in .ci/large-files.sh with the reason" >&2
exit 1
