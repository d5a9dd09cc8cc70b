#!/bin/sh
# Installs Slurm's Debian packages where they are missing. Without root it says what is missing and goes on: the tests
# that need a real cluster are skipped then, with the reason.
set -eu

packages="slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2 nftables libfaketime"
missing=""
for command in slurmctld slurmd sbatch slurmdbd munged mariadbd ip nft; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$command" >/dev/null || missing="$missing $command"
done
# Wrong clocks are made with it, on the nodes of the test cluster.
[ -e "/usr/lib/$(uname -m)-linux-gnu/faketime/libfaketime.so.1" ] || missing="$missing libfaketime"
[ -z "$missing" ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "== no$missing here; for the tests on a real Slurm install as root:"
    echo "   apt-get install --no-install-recommends $packages"
    exit 0
fi
echo "== installing Slurm's packages"
# Their start scripts would run the daemons of a site; the test cluster starts its own.
policy=/usr/sbin/policy-rc.d
made_policy=""
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made_policy=yes
fi
status=0
apt-get update -qq || true
# shellcheck disable=SC2086  # a list of words
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null || status=$?
[ -z "$made_policy" ] || rm -f "$policy"
exit "$status"
