#!/bin/sh
# Turns this process into a command on a node: its own root, where everything of this machine is read-only, and which has
# a fresh disk of its own and the shared volume. It runs in network and mount namespaces of its own.
#
#   node.sh ROOT VOLUME DISK_SIZE NAME COMMAND [KEPT ...]
#
# KEPT are directories of this machine that would be hidden by the node's own /tmp.
set -eu
root=$1 volume=$2 size=$3 name=$4 command=$5
shift 5

hostname "$name"
mount -t tmpfs -o "size=$size,mode=755" node "$root"
for path in /*; do
  case $path in /tmp | /shared | /node | /proc | /dev | /sys) continue ;; esac
  if [ -L "$path" ]; then
    cp -P "$path" "$root$path"
  elif [ -d "$path" ]; then
    mkdir "$root$path"
    mount --rbind "$path" "$root$path"
    mount -o remount,bind,ro "$root$path"
  fi
done
for path in /proc /dev /sys; do
  mkdir "$root$path"
  mount --rbind "$path" "$root$path"
done
mkdir -m 1777 "$root/tmp"
mkdir "$root/shared" "$root/node"
mount --bind "$volume" "$root/shared"
for path in "$@"; do
  if [ ! -e "$root$path" ]; then
    mkdir -p "$root$path"
    mount --bind -o ro "$path" "$root$path"
  fi
done
# The working directory, as SkyPilot puts it there.
mkdir "$root/node/sky_workdir"
cp -R -p services trainer "$root/node/sky_workdir"

exec chroot "$root" sh -c 'cd /node/sky_workdir && exec bash -c "$0"' "$command"
