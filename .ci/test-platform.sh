#!/bin/sh
# Tests the main path and the checkpoints on other Pythons, e.g. `.ci/test-platform.sh /usr/bin/python3 python3.13`.
# PLATFORM_TORCH is what pip installs. Where it has none for a Python, the half that needs no torch is tested.
set -eu
torch=${PLATFORM_TORCH:-$(grep '^torch==' constraints.txt)+cpu}
main="tests/checkpoint tests/end_to_end/test_main_path_here.py"
torch_free="tests/config tests/launch tests/slurm tests/rundir tests/status"

find_python() {
    for candidate in "$HOME/.pyenv/versions/${1#python}".*/bin/python "$1"; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$candidate" && return
    done
}

for wanted in "$@"; do
    python=$(find_python "$wanted") || { echo "== not run: $wanted is missing or older than 3.10"; continue; }
    version=$("$python" -c 'import platform; print(platform.python_version())')
    venv=.venv-platform/$version
    install="$PWD/.venv/bin/python -m pip --python $venv/bin/python --quiet --disable-pip-version-check install"
    if [ ! -e "$venv/.ready" ] || [ -n "$(find pyproject.toml constraints.txt -newer "$venv/.ready")" ]; then
        echo "== setting up $venv with $python"
        "$python" -m venv --without-pip --clear "$venv"
        $install "$torch" 2>/dev/null || echo "== there is no $torch for Python $version"
        $install --no-deps --editable .
        "$venv/bin/python" -c 'from importlib.metadata import requires
print(*(one for one in requires("slurm-train") if "extra ==" not in one and not one.startswith("torch")), sep="\n")' >"$venv/requirements.txt"
        $install --requirement "$venv/requirements.txt" 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100'
        touch "$venv/.ready"
    fi
    # shellcheck disable=SC2086  # lists of words
    if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        echo "== Python $version"
        "$venv/bin/python" -m pytest -q $main
    else
        echo "== Python $version, without torch"
        "$venv/bin/python" -m pytest -q -m "not slurm and not campaign and not slow and not distributed" $torch_free
    fi
done
