#!/bin/sh
# system-packages.sh [quick|full]: installs the Debian packages that tests need and that are missing here; `quick` are
# those of `make test`. Without root, or where the distribution has no such package, it says what is missing and goes on:
# the tests concerned are skipped then, with the reason.
set -eu
tests=${1:-full}

# The start scripts of some would run the daemons of a site; the test cluster starts its own.
policy=/usr/sbin/policy-rc.d
made_policy=""
trap '[ -z "$made_policy" ] || rm -f "$policy"' EXIT
wanted=""

# Prints which of these commands, or files where a word begins with "/", are missing.
missing_of() {
    for name in "$@"; do
        case $name in
        /*) [ -e "$name" ] || printf ' %s' "$name" ;;
        *) PATH="$PATH:/usr/sbin:/sbin" command -v "$name" >/dev/null || printf ' %s' "$name" ;;
        esac
    done
}

# require PURPOSE "commands and files" "packages that bring them"
require() {
    # shellcheck disable=SC2086  # a list of words
    missing=$(missing_of $2)
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "== missing for $1:$missing"
        echo "   install as root: apt-get install --no-install-recommends $3"
        return 0
    fi
    wanted="$wanted $3"
}

# libfaketime makes wrong clocks on the nodes of the test cluster.
require "a real Slurm" \
    "slurmctld slurmd sbatch slurmdbd munged mariadbd ip nft /usr/lib/$(uname -m)-linux-gnu/faketime/libfaketime.so.1" \
    "slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2 nftables libfaketime"
if [ "$tests" = full ]; then
    require "a file system that behaves as NFS does" \
        "gcc pkg-config fusermount3 /usr/include/stdio.h /usr/include/fuse3/fuse.h" \
        "gcc libc6-dev pkg-config fuse3 libfuse3-dev"
    require "a look at pages in a browser" "chromium chromedriver" "chromium chromium-driver"
    require "completion in other shells" "zsh fish" "zsh fish"
    require "a login node behind ssh" "ssh sshd" "openssh-client openssh-server"
fi
[ -n "$wanted" ] || exit 0

apt-get update -qq || echo "== apt-get update failed"
packages=""
for package in $wanted; do
    if apt-cache show "$package" >/dev/null 2>&1; then
        packages="$packages $package"
    else
        echo "== this distribution has no package $package: tests that need it are skipped"
    fi
done
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made_policy=yes
fi
# One installation for all: each one reads and writes the lists of packages again.
echo "== installing:$packages"
# shellcheck disable=SC2086  # a list of words
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
