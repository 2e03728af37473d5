#!/usr/bin/env bash
# Fetch a model's published weights into a folder, after naming repositories, sizes and licences.
# An interrupted download goes on where it stopped when the same command is given again.
set -euo pipefail

readonly MODELS="janus_pro janus_pro_1b lumina_mgpt emu3"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly root

# One line per repository: name | GB | what is fetched (patterns) | option | licence
sources() {
  local all="*.json *.jinja *.safetensors"
  local janus="code MIT, weights DeepSeek Model License (the model page is tagged MIT)"
  local chameleon="Meta's Chameleon Research License: non-commercial research only"
  case "$1" in
    janus_pro) echo "deepseek-community/Janus-Pro-7B|14.8|$all|path|$janus" ;;
    janus_pro_1b) echo "deepseek-community/Janus-Pro-1B|4.2|$all|path|$janus" ;;
    lumina_mgpt)
      echo "Alpha-VLLM/Lumina-mGPT-7B-768|14.0|$all|path|none on the model page; made from Chameleon-7B, $chameleon"
      echo "GAIR/Anole-7b-v0.1|0.3|tokenizer/vqgan.ckpt|image_decoder|$chameleon"
      ;;
    emu3) echo "BAAI/Emu3-Gen-hf|35.1|$all *.txt|path|Apache-2.0" ;;
  esac
}

usage() {
  cat <<'TEXT'
usage: scripts/download_weights.sh [--yes] MODEL DIR

Fetches the weights of MODEL into DIR/<repository>; --yes does not ask first.

TEXT
  local model
  for model in $MODELS; do
    describe "$model"
  done
}

describe() {
  local repo size patterns option licence
  echo "$1"
  while IFS='|' read -r repo size patterns option licence; do
    echo "  https://huggingface.co/$repo: about $size GB ($patterns)"
    echo "    licence: $licence"
  done < <(sources "$1")
}

die() {
  echo "error: $1" >&2
  exit 2
}

# The project's own huggingface_hub before another one.
find_hf() {
  if [[ -x "$root/.venv/bin/hf" ]]; then
    echo "$root/.venv/bin/hf"
  else
    command -v hf || die "the command hf is missing; make it with: pip install huggingface_hub"
  fi
}

ask() {
  local answer=""
  read -r -p "Fetch these files, and accept these licences? [y/N] " answer || true
  case "$answer" in
    y | Y | yes) ;;
    *)
      echo "nothing was fetched"
      exit 1
      ;;
  esac
}

fetch() {
  local hf="$1" repo="$2" place="$3" patterns="$4" pattern
  local include=()
  set -f # the patterns are the hub's, not this folder's
  for pattern in $patterns; do
    include+=(--include "$pattern")
  done
  set +f
  "$hf" download "$repo" "${include[@]}" --local-dir "$place" </dev/null ||
    die "$repo did not arrive whole; the same command goes on where it stopped (a page that asks you to accept terms first wants: hf auth login)"
}

main() {
  local yes="" arguments=() argument
  for argument in "$@"; do
    case "$argument" in
      --yes | -y) yes=1 ;;
      --help | -h)
        usage
        exit 0
        ;;
      -*) die "unknown option $argument; accepted: --yes, --help" ;;
      *) arguments+=("$argument") ;;
    esac
  done
  if [[ ${#arguments[@]} -eq 0 ]]; then
    usage >&2
    exit 2
  fi
  local model="${arguments[0]}"
  [[ " $MODELS " == *" $model "* ]] || die "MODEL=$model is not known; accepted: $MODELS"
  [[ ${#arguments[@]} -eq 2 ]] || die "give MODEL and DIR: scripts/download_weights.sh $model DIR"
  local hf
  hf="$(find_hf)"
  describe "$model"
  [[ -n "$yes" ]] || ask
  mkdir -p "${arguments[1]}" 2>/dev/null || die "DIR=${arguments[1]} cannot be made"
  local folder repo size patterns option licence options="model=$model"
  folder="$(cd "${arguments[1]}" && pwd)"
  while IFS='|' read -r repo size patterns option licence; do
    fetch "$hf" "$repo" "$folder/${repo##*/}" "$patterns"
    options+=" 'model.backbone.$option=$folder/${repo##*/}'"
  done < <(sources "$model")
  echo "Pass these options to every command, and check the weights once:"
  printf '  python -m ssd_research.backbones.check %s\n' "$options"
}

main "$@"
