#!/bin/bash
# Stands in for `apptainer exec` where there is none (needs root). IMAGE is a text file: the host's folders that are "in
# the image". The command sees those, /proc, /sys and /dev, and what is bound; nothing else of the host's files. Every
# stage replaces the one before, so the command has this process's id and gets its signals.
set -eu
[ "$1" = exec ] || exit 64
shift
binds=() start=/
while :; do
  case "$1" in
    --bind) binds+=("$2"); shift 2 ;;
    --pwd) start=$2; shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
image=$1
shift
# Any folder will do: the mount is seen in here alone.
root=/mnt
# shellcheck disable=SC2016  # expanded inside
exec unshare --mount --propagation private bash -eu -c '
  root=$1 image=$2 start=$3 count=$4
  shift 4
  mount -t tmpfs image "$root"
  while read -r path; do
    mkdir -p "$root$path"
    mount --rbind "$path" "$root$path"
  done < <(cat "$image"; printf "%s\n" /proc /sys /dev)
  for ((; count > 0; count--)); do
    IFS=: read -r source inside flags <<< "$1"
    mkdir -p "$root${inside:-$source}"
    mount --bind "$source" "$root${inside:-$source}"
    [ "$flags" != ro ] || mount -o remount,bind,ro "$root${inside:-$source}"
    shift
  done
  exec chroot "$root" env -C "$start" "$@"
' bash "$root" "$image" "$start" "${#binds[@]}" "${binds[@]}" "$@"
