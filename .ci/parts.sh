#!/usr/bin/env bash
# parts.sh COMMAND PART...: makes each part, also after one has failed, and ends with the verdict of each.
set -uo pipefail
command=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT
verdicts=()
failed=0
for part in "$@"; do
    begin=$SECONDS
    echo "== make $part"
    verdict=passed
    make --no-print-directory "$part" 2>&1 | tee "$log" || { verdict=FAILED failed=1; }
    # The last line that says something: pytest's own verdict, without its frame.
    last=$(grep --invert-match --extended-regexp '^(make.*|=*|\s*)$' "$log" | tail --lines 1 | sed 's/^[= ]*//; s/[= ]*$//')
    verdicts+=("$(printf '%-7s %-14s %3d:%02d  %s' "$verdict" "$part" $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60)) "${last:0:150}")")
done
echo
echo "== make $command: $([ "$failed" = 0 ] && echo passed || echo FAILED) after $((SECONDS / 60)) min $((SECONDS % 60)) s"
printf '%s\n' "${verdicts[@]}"
exit "$failed"
