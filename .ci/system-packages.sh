#!/bin/sh
# Installs the Debian packages that the tests need and that are missing here. Without root, or where the distribution
# has no such package, it says what is missing and goes on: the tests concerned are skipped then, with the reason.
set -eu

# The start scripts of some would run the daemons of a site; the test cluster starts its own.
policy=/usr/sbin/policy-rc.d
made_policy=""
trap '[ -z "$made_policy" ] || rm -f "$policy"' EXIT
updated=""

# Prints which of these commands, or files where a word begins with "/", are missing.
missing_of() {
    for wanted in "$@"; do
        case $wanted in
        /*) [ -e "$wanted" ] || printf ' %s' "$wanted" ;;
        *) PATH="$PATH:/usr/sbin:/sbin" command -v "$wanted" >/dev/null || printf ' %s' "$wanted" ;;
        esac
    done
}

# Prints which of these packages the distribution does not have.
unavailable_of() {
    for package in "$@"; do
        apt-cache show "$package" >/dev/null 2>&1 || printf ' %s' "$package"
    done
}

# require PURPOSE "commands and files" "packages that bring them"
require() {
    purpose=$1
    packages=$3
    # shellcheck disable=SC2086  # a list of words
    missing=$(missing_of $2)
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "== missing for $purpose:$missing"
        echo "   install as root: apt-get install --no-install-recommends $packages"
        return 0
    fi
    if [ -z "$updated" ]; then
        apt-get update -qq || echo "== apt-get update failed"
        updated=yes
    fi
    # shellcheck disable=SC2086  # a list of words
    unavailable=$(unavailable_of $packages)
    if [ -n "$unavailable" ]; then
        echo "== missing for $purpose:$missing"
        echo "   this distribution has no package$unavailable"
        return 0
    fi
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        made_policy=yes
    fi
    echo "== installing what $purpose needs: $packages"
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
}

# libfaketime makes wrong clocks on the nodes of the test cluster.
require "a real Slurm" \
    "slurmctld slurmd sbatch slurmdbd munged mariadbd ip nft /usr/lib/$(uname -m)-linux-gnu/faketime/libfaketime.so.1" \
    "slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2 nftables libfaketime"
require "a file system that behaves as NFS does" \
    "gcc pkg-config fusermount3 /usr/include/stdio.h /usr/include/fuse3/fuse.h" \
    "gcc libc6-dev pkg-config fuse3 libfuse3-dev"
require "a look at pages in a browser" "chromium chromedriver" "chromium chromium-driver"
require "completion in other shells" "zsh fish" "zsh fish"
