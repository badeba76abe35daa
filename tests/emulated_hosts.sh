#!/bin/bash
# Hosts on one machine, for measurements between "nodes"; needs root, ip and tc.
#
#   tests/emulated_hosts.sh up 4              h1 ... h4, 10.77.0.1 ... on one bridge
#   tests/emulated_hosts.sh shape 1gbit       the rate of every link, both ways
#   tests/emulated_hosts.sh mpirun h1:2,h2:2 -n 4 python PROGRAM     2 ranks on each
#   tests/emulated_hosts.sh exec h1 COMMAND
#   tests/emulated_hosts.sh cut h2 | join h2  unplug a host, plug it in again
#   tests/emulated_hosts.sh unshape | down
#
# Each host has its own network namespace, host name, IPC namespace and /dev/shm, so that
# MPI takes them for different machines.
set -euo pipefail
X=emh
self=$(readlink -f "$0")
up() {
  local n=${1:-4} k h
  [ -e "/run/netns/$X-sw" ] && { echo "already up"; return 0; }
  ip netns add "$X-sw"; ip -n "$X-sw" link add br0 type bridge; ip -n "$X-sw" link set br0 up
  for k in $(seq "$n"); do
    h=h$k; ip netns add "$X-$h"
    ip -n "$X-$h" link set lo up
    ip link add eth0 netns "$X-$h" type veth peer name "p$k" netns "$X-sw"
    ip -n "$X-sw" link set "p$k" master br0 up
    ip -n "$X-$h" addr add "10.77.0.$k/24" dev eth0
    ip -n "$X-$h" link set eth0 up
    mkdir -p "/etc/netns/$X-$h"
    { echo 127.0.0.1 localhost; for j in $(seq "$n"); do echo "10.77.0.$j h$j"; done; } > "/etc/netns/$X-$h/hosts"
  done
}
down() {
  local f
  for f in /run/netns/$X-*; do
    [ -e "$f" ] || continue
    f=$(basename "$f"); ip netns del "$f"; rm -rf "/etc/netns/$f"
  done
  rmdir /etc/netns 2>/dev/null || :
}
ports() { ip -n "$X-sw" -o link show type veth | sed -E 's/^[0-9]+: (p[0-9]+)@.*/\1/'; }
shape() {
  local p k q r=$1
  for p in $(ports); do k=${p#p}
    for q in "$X-sw $p" "$X-h$k eth0"; do set -- $q
      tc -n "$1" qdisc replace dev "$2" root handle 1: htb default 1
      tc -n "$1" class replace dev "$2" parent 1: classid 1:1 htb rate "$r" burst 64k cburst 64k
    done
  done
}
unshape() {
  local p k
  for p in $(ports); do k=${p#p}
    tc -n "$X-sw" qdisc del dev "$p" root 2>/dev/null || :
    tc -n "$X-h$k" qdisc del dev eth0 root 2>/dev/null || :
  done
}
in_host() { # HOST CMD...
  local h=$1; shift
  exec ip netns exec "$X-$h" unshare -u -i -m sh -c \
    'hostname "$0" && mount -t tmpfs -o size=8g none /dev/shm && exec "$@"' "$h" "$@"
}
as_ssh() {
  while [ "${1#-}" != "$1" ]; do shift; done
  local h=$1; shift
  in_host "$h" sh -c "$*"
}
mpi_run() { # HOSTS ARGUMENTS: MPICH's mpirun, which starts its helpers by "ssh"
  local hosts=$1; shift
  in_host "${hosts%%[:,]*}" mpirun -launcher ssh -launcher-exec "$self" -hosts "$hosts" "$@"
}
c=${1:-}; shift || :
case $c in
  up) up "$@";; down) down;; shape) shape "$1";; unshape) unshape;;
  cut) ip -n "$X-sw" link set "p${1#h}" down;;
  join) ip -n "$X-sw" link set "p${1#h}" up;;
  exec) in_host "$@";;
  mpirun) mpi_run "$@";;
  -*|h[0-9]*) as_ssh "$c" "$@";;
  *) sed -n '2,12p' "$self"; exit 2;;
esac
