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
waited=0
while [ ! -e "$1/$2" ]; do
  [ "$waited" -lt "$3" ] || { echo "stale $SLURMD_NODENAME"; exit; }
  waited=$((waited + 1)); sleep 1
done
echo "fine $SLURMD_NODENAME"
