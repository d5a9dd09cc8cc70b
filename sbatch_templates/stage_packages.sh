#!/bin/sh
# Copies an archive of Python packages to this node's disk, and prints "<answer> <node>":
#   staged   the copy is whole; the ranks import from it
#   foreign  somebody else has made the folder, or may enter it
#   open     others can exchange a folder above it
#   full     the archive could not be unpacked here
# Arguments: folder for temporary files, name of the copy, archive, seal (its files with their sizes).
#
# Another user could have put packages where these are looked for: so only what lies in a folder of this user counts, in
# one whose names nobody else may change. A file that is missing, or has another size, makes the whole copy anew.
umask 077
top=$1/slurm_train_$(id -u) place=$1/slurm_train_$(id -u)/$2 archive=$3 seal=$4
answer() { echo "$1 $SLURMD_NODENAME"; exit; }
mkdir -p "$top" 2>/dev/null
# shellcheck disable=SC3067  # dash, bash and busybox have -O
if [ -L "$top" ] || [ ! -O "$top" ] || [ -n "$(find "$top" -maxdepth 0 -perm /077)" ]; then answer foreign; fi
folder=$(readlink -f "$1")
while [ -z "$(find "$folder" -maxdepth 0 -perm -0002 ! -perm -1000)" ] && [ "$folder" != / ]; do
  folder=$(dirname "$folder")
done
[ "$folder" = / ] || answer open
# Two jobs may begin on a node at the same time, and nodes may share the folder: the second one waits for the first.
exec 9>>"$top/.lock" && flock 9
# A job may run for longer: what its processes have mapped stays. $1 is that of the inner shell.
# shellcheck disable=SC2016
find "$top" -mindepth 1 -maxdepth 1 ! -name .lock -mtime +30 -exec sh -c \
  'grep -qsF "$(readlink -f "$1")/" /proc/[0-9]*/maps || rm -rf "$1"' sh {} \; 2>/dev/null
lost() {
  (cd "$place" && find . ! -type d ! -name '*.pyc' -printf '%s %P\n') | LC_ALL=C sort | LC_ALL=C comm -23 "$seal" -
}
# The last line of a seal says how long the archive is; no copy has it.
is_whole() { [ -d "$place" ] && [ -s "$seal" ] && [ "$(lost)" = "$(tail -n 1 "$seal")" ]; }
if ! is_whole; then
  if fresh=$(mktemp -d "$top/.XXXXXX") && tar -xf "$archive" -C "$fresh" && sync -f "$fresh"; then
    [ ! -d "$place" ] || mv -T "$place" "$fresh.old"
    mv -T "$fresh" "$place" && sync -f "$top"
    rm -rf "$fresh.old"
  fi
  [ ! -d "$fresh" ] || rm -rf "$fresh"
fi
if is_whole; then touch "$place"; answer staged; fi
rm -rf "$place"
answer full
