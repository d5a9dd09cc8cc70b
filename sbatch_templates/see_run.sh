#!/bin/sh
# Asks a node whether it sees a run, and prints "<answer> <node>":
#   fine      it sees and can write the run directory
#   blind     it does not see it
#   readonly  it cannot write there
#   stale     it does not see a file that was made before the question, within the time
# Arguments: run directory, file to wait for (below it), seconds to wait.
if [ ! -r "$1/config.yaml" ]; then echo "blind $SLURMD_NODENAME"; exit; fi
if ! (: > "$1/logs/.seen_by_$SLURMD_NODENAME") 2>/dev/null; then echo "readonly $SLURMD_NODENAME"; exit; fi
rm -f "$1/logs/.seen_by_$SLURMD_NODENAME"
folder=$(dirname "$1/$2")
waited=0
while :; do
  # An NFS client remembers absent names for up to a minute, and asks the server when the folder is opened: the ranks of
  # an earlier attempt on this node have looked for the next one.
  (: < "$folder") 2>/dev/null
  [ ! -e "$1/$2" ] || break
  [ "$waited" -lt "$3" ] || { echo "stale $SLURMD_NODENAME"; exit; }
  waited=$((waited + 1)); sleep 1
done
echo "fine $SLURMD_NODENAME"
