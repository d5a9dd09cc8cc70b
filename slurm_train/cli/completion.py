"""`completion bash|zsh|fish`: prints the script that completes words at a TAB.

It completes `slurm-train`, and `python -m slurm_train` as well; what else python is completed by stays.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from shlex import quote

_EXAMPLES = """\
examples:
  source <(python -m slurm_train completion bash)      now, in this shell; in ~/.bashrc for ever
  source <(python -m slurm_train completion zsh)       in ~/.zshrc after compinit
  python -m slurm_train completion fish | source       in ~/.config/fish/config.fish
  complete -F _slurm_train train                       bash: for an alias `train` of yours
"""

_BASH = """\
# Completion of slurm-train and `python -m slurm_train` for bash.
_slurm_train_ask() {
  local IFS=$'\\n'
  COMPREPLY=($("$@" complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null))
  compopt -o nospace +o default +o bashdefault 2>/dev/null
}

# The program that is typed answers; an alias, which is no program, is answered by the Python that printed this.
_slurm_train() {
  local program
  if program=$(type -P -- "${COMP_WORDS[0]/#\\~/$HOME}"); then
    _slurm_train_ask "$program"
  else
    _slurm_train_ask @PYTHON@ -m slurm_train
  fi
}

_slurm_train_python() {
  if [[ ${COMP_WORDS[1]} == -m && ${COMP_WORDS[2]} == slurm_train && $COMP_CWORD -gt 2 ]]; then
    _slurm_train_ask "$(type -P -- "${COMP_WORDS[0]/#\\~/$HOME}")" -m slurm_train
  elif [[ $_slurm_train_before ]]; then
    "$_slurm_train_before" "$@"
  fi
}

# What completes python already is asked for everything else.
if declare -F _comp_load >/dev/null; then
  _comp_load python 2>/dev/null
elif declare -F _completion_loader >/dev/null; then
  _completion_loader python 2>/dev/null
fi
_slurm_train_before=$(complete -p python 2>/dev/null | sed -n 's/.*-F \\([^ ]*\\).*/\\1/p')
[[ $_slurm_train_before == _slurm_train_python ]] && _slurm_train_before=
complete -F _slurm_train slurm-train
complete -o bashdefault -o default -F _slurm_train_python python python3
"""

_ZSH = """\
#compdef slurm-train
# Completion of slurm-train and `python -m slurm_train` for zsh; source it after compinit.
_slurm_train_ask() {
  local kind text about
  local -a finished finished_about open open_about
  while IFS=$'\\t' read -r kind text about; do
    if [[ $kind == more ]]; then
      open+=("$text") open_about+=("$text${about:+  -- $about}")
    elif [[ $kind == done ]]; then
      finished+=("$text") finished_about+=("$text${about:+  -- $about}")
    fi
  done < <("$@" complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
  (( $#open )) && compadd -l -S '' -d open_about -a open
  (( $#finished )) && compadd -l -d finished_about -a finished
}

_slurm_train() {
  local program=${~words[1]}
  if [[ -n ${commands[$program]} || -x $program ]]; then
    _slurm_train_ask $program
  else
    _slurm_train_ask @PYTHON@ -m slurm_train
  fi
}

_slurm_train_python() {
  if [[ ${words[2]} == -m && ${words[3]} == slurm_train ]] && (( CURRENT > 3 )); then
    _slurm_train_ask ${~words[1]} -m slurm_train
  elif (( $+functions[_python] )); then
    _python "$@"
  else
    _files
  fi
}

autoload -Uz +X _python 2>/dev/null
compdef _slurm_train slurm-train
compdef _slurm_train_python python python3
"""

_FISH = """\
# Completion of slurm-train and `python -m slurm_train` for fish.
function __slurm_train_ask
    set -l words (commandline -opc)
    set -l program $words[1]
    command -q $program; or set program @PYTHON@ -m slurm_train
    if test (count $words) -ge 3; and test "$words[2] $words[3]" = "-m slurm_train"
        set program $program -m slurm_train
    end
    command $program complete fish $words[2..-1] (commandline -ct) 2>/dev/null
end

function __slurm_train_by_module
    set -l words (commandline -opc)
    test (count $words) -ge 3; and test "$words[2] $words[3]" = "-m slurm_train"
end

complete -c slurm-train -f -k -a '(__slurm_train_ask)'
for name in python python3
    complete -c $name -n __slurm_train_by_module -f -k -a '(__slurm_train_ask)'
end
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def main(words: Sequence[str]) -> int:
    """Prints the script and returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m slurm_train completion",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(_SCRIPTS), help="your shell")
    arguments = parser.parse_args(list(words))
    print(_SCRIPTS[arguments.shell].replace("@PYTHON@", quote(sys.executable)), end="")
    return 0
