# The practice cluster's network: two nodes that are two hosts, joined by a cable of a chosen speed. Needs root.
# practice_cluster.sh reads this file.
#
#          this machine: 198.18.0.254
#            fsdp0n1 |    | fsdp0n2         not slowed: Slurm's own traffic, and what your jobs print
#            control |    | control
#     node: 198.18.0.1    198.18.0.2        each with a network, a host name and a /sys of its own
#               eth0 ====== eth0            the cable: what ranks on different nodes send each other
#
# A node's network lives as long as the processes in it. The first of them does nothing but hold it, and once it has
# been ended the cable and the control links are gone too, whatever happened before.

NETWORK=198.18 # 198.18.0.0 to 198.19.255.255 is set aside for measuring networks (RFC 2544)
CLUSTERS=10    # at once on this machine: the third number of the addresses is the first that is free
MTU=9000       # as in most clusters: of the 9014 bytes of a frame, 8948 are the sender's
PIECE=66000    # the most that the kernel hands to a link at once: 64 KB, and its headers
LATE_MS=2      # how late the kernel may be in sending what is due, and still catch up

in_own_network() { unshare --net --uts --mount --propagation slave "$@"; }
entrance() { echo nsenter --target "$(node_process "$1")" --net --uts --mount; }
in_node() { $(entrance "$1") "${@:2}"; }
node_process() { awk -v name="network.$1" '$2 == name { print $1 }' "$dir/pids"; }

# ---- may it be? -----------------------------------------------------------------------------------------------

refuse() { say "$@"; exit 2; }

# Every reason why not, before anything is made.
check_network() { # rate
  local command missing=""
  check_rate "$1"
  for command in ip tc unshare nsenter hostname; do
    [ -x "$(type -P $command)" ] || missing="$missing, no $command"
  done
  [ -z "$missing" ] || refuse "LINK needs tools that are missing here (${missing#, }), so first type:" \
    "sudo apt-get install --no-install-recommends iproute2 util-linux hostname"
  check_root
  # The same things, done for a moment in a network that ends with the command.
  in_own_network bash -ec "$(declare -f shape burst_bytes); PIECE=$PIECE LATE_MS=$LATE_MS
    hostname x; mount -t sysfs sysfs /sys; ip link add eth0 type veth peer name y; shape 10mbit" 2> /dev/null ||
    refuse "LINK cannot be had here: root may not make networks (a container needs --cap-add NET_ADMIN and" \
      "--cap-add SYS_ADMIN), or the kernel lacks veth or tbf; leave LINK out."
  free_network 0 > /dev/null ||
    refuse "the addresses $NETWORK.0.1 to $NETWORK.$((CLUSTERS - 1)).254 are all in use here:" \
      "first take down another checkout's practice cluster, or whatever uses them."
}

check_root() {
  [ "$(id -u)" = 0 ] ||
    refuse "LINK needs root, to give each node a network: put sudo before the command, or leave LINK out."
}

check_rate() {
  [[ $1 =~ ^([1-9][0-9]{1,3}mbit|[1-9][0-9]{0,2}gbit|none)$ ]] ||
    refuse "LINK is '$1': give a rate from 10mbit to 999gbit, such as 200mbit, or none for a link that is not slowed."
}

# The first number from $1 on whose addresses nobody uses here: no other cluster, no other network.
free_network() {
  local number routes
  for ((number = $1; number < CLUSTERS; number++)); do
    # those inside the range, and those around it
    routes=$(for which in root match; do ip -4 route show table all "$which" "$NETWORK.$number.0/24"; done)
    grep -qv ^default <<< "${routes:-default}" || { echo "$number"; return; }
  done
  return 1
}

# ---- make and remove ------------------------------------------------------------------------------------------

# Sets NODES, the nodes' addresses (and names), and CONTROLLER, this machine's address as they know it.
make_network() { # rate
  local i number
  cp /etc/hosts "$dir/etc/hosts"
  for i in 1 2; do
    start "network.$i" unshare --net --uts --mount --propagation slave \
      bash -ec 'mount -t sysfs sysfs /sys; mount --bind "$1" /etc/hosts; exec -a "$0" sleep infinity' \
      "$base/network.$i" "$base/etc/hosts"
  done
  wait_until networks

  number=$(claim_network)
  CONTROLLER=$NETWORK.$number.254
  NODES=("$NETWORK.$number.1" "$NETWORK.$number.2")
  name_addresses >> "$dir/etc/hosts"
  add_link "fsdp${number}n2" "" control 2
  add_link eth0 "$(node_process 1)" eth0 2
  for i in 1 2; do connect "$i" "fsdp${number}n$i" "${NODES[i - 1]}" "${NODES[2 - i]}"; done
  set_link "$1"
  write_task_prolog > "$dir/bin/task_prolog"
  chmod +x "$dir/bin/task_prolog"
}
networks() { local i; for i in 1 2; do [[ $(command_line "$(node_process $i)") == "$base/"* ]] || return; done; }

# The name of an interface can be taken only once: of two clusters that start together, one goes on to the next number.
claim_network() {
  local number=0
  while number=$(free_network "$number"); do
    if add_link "fsdp${number}n1" "" control 1 2> /dev/null; then echo "$number" && return; fi
    number=$((number + 1))
  done
  say "no more addresses in $NETWORK."
  return 1
}

add_link() { # its one end, the process in whose network that is (here, if empty), its other end, the other's node
  ip link add "$1" ${2:+netns "$2"} mtu "$MTU" type veth peer name "$3" mtu "$MTU" netns "$(node_process "$4")"
}

connect() { # node, its control link's end here, its address, the other node's
  local interface
  ip addr add "$CONTROLLER" peer "$3" dev "$2"
  ip link set "$2" up alias "$base"
  in_node "$1" ip addr add "$3" dev eth0
  # (without IPv6, whose greetings would be counted on the cable)
  for interface in eth0 control; do in_node "$1" ip link set "$interface" addrgenmode none up; done
  in_node "$1" ip link set lo up
  in_node "$1" ip route add "$CONTROLLER" dev control src "$3"
  # BBR, the default of some machines, slows down now and then to probe the link, and needs time to notice a new speed.
  in_node "$1" ip route add "$4" dev eth0 src "$3" congctl reno
  # torchrun opens its rendezvous on the node whose host name is that of the rendezvous.
  in_node "$1" hostname "$3"
}

# PyTorch asks for the name of every address that connects to it, and complains where there is none.
name_addresses() {
  local address name
  while read -r address name; do printf '%s %s\n' "$address" "$name" "::ffff:$address" "$name"; done <<HOSTS
127.0.0.1 localhost
${NODES[0]} ${NODES[0]}
${NODES[1]} ${NODES[1]}
HOSTS
}

# On this machine ranks meet on the loopback interface, on the nodes on the cable.
write_task_prolog() {
  echo '#!/bin/sh'
  echo 'echo export GLOO_SOCKET_IFNAME=eth0'
}

# Now what the kernel would do a little later: the networks went with their last processes. Another cluster may have
# the number by now, and so the names of the links, but not their alias, which says whose they are.
remove_network() {
  local link
  for link in /sys/class/net/fsdp*; do
    if [ "$(cat "$link/ifalias" 2> /dev/null)" = "$base" ]; then
      ip link delete "${link##*/}" 2> /dev/null || true # gone already
    fi
  done
}

# ---- the speed ------------------------------------------------------------------------------------------------

# Of the cluster that is up.
change_link() { # rate
  check_root
  [ -e "$dir/link" ] || refuse "the one that is up has no network between its nodes: first take it down."
  set_link "$1"
  say "the link between the nodes: $1."
}

set_link() { # rate
  for i in 1 2; do
    in_node "$i" bash -ec "$(declare -f shape burst_bytes); PIECE=$PIECE LATE_MS=$LATE_MS; shape $1"
  done
  echo "$1" > "$dir/link"
}

# A token bucket at the sending end. It fills at the rate, and what a silent link has saved up (the burst) goes out
# at once. So a large burst makes short messages look fast. With a small one the rate is never reached: each piece is
# cut up, and what falls due while the kernel is busy elsewhere is lost. The queue takes all that sockets may hold:
# nothing is dropped, as on the networks that clusters are built with.
shape() { # rate
  if [ "$1" = none ]; then
    tc qdisc delete dev eth0 root 2> /dev/null || true
  else
    tc qdisc replace dev eth0 root tbf rate "$1" burst "$(burst_bytes "$1")" limit 64mb
  fi
}

burst_bytes() { # rate: what it sends in LATE_MS, or one piece
  local bytes=$((${1%[mg]bit} * 125 * LATE_MS))
  case $1 in *gbit) bytes=$((bytes * 1000)) ;; esac
  echo $((bytes > PIECE ? bytes : PIECE))
}
