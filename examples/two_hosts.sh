#!/usr/bin/env bash
# Two hosts on one machine, made of network namespaces, with one model. Then the link between them is cut.
# It needs root: sudo env PATH="$PATH" examples/two_hosts.sh
set -euo pipefail
folder=$(mktemp -d)
cd "$folder"
on() { local host=$1; shift; ip netns exec "two-hosts-$host" "$@"; }
clean_up() {
  for host in one two; do
    ip netns pids "two-hosts-$host" 2>/dev/null | xargs -r kill -9
    ip netns del "two-hosts-$host" 2>/dev/null || true
  done
  rm -rf "$folder"
}
trap clean_up EXIT

for host in one two; do ip netns add "two-hosts-$host"; on $host ip link set lo up; done
ip -n two-hosts-one link add eth0 type veth peer name eth0 netns two-hosts-two
on one ip address add 10.78.0.1/24 dev eth0; on one ip link set eth0 up
on two ip address add 10.78.0.2/24 dev eth0; on two ip link set eth0 up

processes() { on one curl -fs http://127.0.0.1:8000/v1/fault_tolerance/status | grep -o '"stage": *"serving"' | wc -l; }
wait_for() { for _ in $(seq 1200); do [ "$(processes || true)" = "$1" ] && return; sleep 0.1; done; cat log-*; exit 1; }
ask() { on one curl -fs http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \
  -d '{"model": "demo", "prompt": "def add(a, b):", "max_tokens": 128, "ignore_eos": true, "temperature": 0}' |
  sed 's/.*"text": *"\(\([^"\\]\|\\.\)*\)".*/\1/'; }

# Host one: the API, an attention worker, and two expert servers that hold every expert twice.
on one moesaic serve demo --expert-servers 2 --min-replicas 2 --threads 1 \
  --cluster-address tcp:10.78.0.1:7000 --cluster-secret-file "$folder/secret" >log-one 2>&1 &
wait_for 3
# Host two: an attention worker and an expert server, with a copy of the secret (here: the same file).
for role in attention-worker expert-server; do
  on two moesaic join 10.78.0.1:7000 --role $role --threads 1 --secret-file "$folder/secret" >"log-$role" 2>&1 &
done
wait_for 5
ask >before; echo "5 processes on two hosts: $(cat before)"
ask >during & answer=$!
ip -n two-hosts-two link set eth0 down
wait $answer; echo "the same answer while the link is cut: $(cmp -s before during && echo True || echo False)"
wait_for 3; echo "host two is given up: $(processes) processes"
ip -n two-hosts-two link set eth0 up
wait_for 5; ask >after
echo "it joined again, with the same answer: $(cmp -s before after && echo True || echo False)"
