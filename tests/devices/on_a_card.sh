#!/usr/bin/env bash
# Run privlab on a CUDA card: its tests, speeds, equality with the CPU, and limits. It needs no network and no installation.
#
#   tests/devices/on_a_card.sh OUT [--wheels DIR] [--dry] [--minutes N] [--only STEP,STEP...]
#
# OUT      folder for the results: at most nine files. Each step writes its own before the next one starts.
# --wheels folder with the wheels of requirements-card.txt, for a machine that lacks them.
# --dry    take the same steps on the CPU, with tiny sizes.
# --minutes after this time no step goes on (8).
# --only   take these steps alone; site and machine always: pytest, deit_s, vit_ti_160, search, equality, readme,
#          vit_b, limits.
#
# A step that fails or takes too long is reported, and the next one starts. The exit status is 1 if one failed.
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out="" wheels="" dry="" minutes=8 only=""
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2; shift ;;
    --minutes) minutes=$2; shift ;;
    --only) only=$2; shift ;;
    --dry) dry=1 ;;
    -*) echo "Unknown option '$1'. Use --wheels DIR, --dry, --minutes N or --only STEP,STEP." >&2; exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || { echo "The folder for the results is missing: on_a_card.sh OUT." >&2; exit 2; }
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
: > "$out/steps.tsv"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
device=cuda
[ -n "$dry" ] && device=cpu && export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 PRIVLAB_CACHE="$work/cache" MPLCONFIGDIR="$work/mpl"
export PYTHONPATH="$work/site:$root" TERM=dumb COLUMNS=120

# step NAME SECONDS COMMAND...: at most so many seconds, and never beyond the time of the whole script.
step() {
  local name=$1 limit=$2 began=$SECONDS left=$((minutes * 60 - SECONDS)) status
  shift 2
  if [ -n "$only" ] && [[ $name != site && $name != machine && ",$only," != *",${name#bench-},"* ]]; then
    return
  fi
  [ -n "$dry" ] && limit=$((10 * limit)) && left=$limit  # a busy machine without a card is no fault
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 1 ]; then
    printf '%s\t0\t0\tskipped\n' "$name" >> "$out/steps.tsv"
    return
  fi
  echo "== $name (at $SECONDS s, for at most $limit s)"
  if [ -n "${to:-}" ]; then
    timeout --kill-after=5 "$limit" "$@" < /dev/null > "$to"
  else
    timeout --kill-after=5 "$limit" "$@" < /dev/null
  fi
  status=$?
  printf '%s\t%s\t%s\t%s\n' "$name" "$limit" "$((SECONDS - began))" "$status" >> "$out/steps.tsv"
}

card=("$python" "$here/on_a_card.py")
privlab=("$python" -c 'from privlab.cli import main; main()')

# bench NAME SECONDS OPTION...: the JSON of `privlab bench attack`.
bench() {
  local name=$1 limit=$2
  shift 2
  to="$out/bench-$name.json" step "bench-$name" "$limit" "${privlab[@]}" bench attack "$@" \
    --device "$device" --no-memory --no-main-job --json
}

run() {
  step site 60 "${card[@]}" site "$work/site" ${wheels:+--wheels "$wheels"}
  step machine 60 "${card[@]}" machine "$out/machine.json" --device "$device"

  local workers=8 tests
  [ -n "$dry" ] && workers=0
  mapfile -t tests < <(grep -rl --include='test_*.py' 'mark\.gpu' "$root/tests")
  step pytest 150 "$python" -m pytest -m gpu -q -p no:cacheprovider -p no:benchmark -n "$workers" -W default \
    --rootdir "$root" -c "$root/pyproject.toml" "${tests[@]}"

  if [ -n "$dry" ]; then
    bench deit_s 40 --model cifar_vit --images 2 --batch 2 --repeats 1 --no-searches
    bench vit_ti_160 60 --model cifar_vit --img-size 16 --images 2 --batch 2 --repeats 1
    step search 60 "${card[@]}" search "$out/search.json" --device cpu
    step equality 90 "${card[@]}" equality "$out/equality.json" --device cpu --images 2 --few --seconds 600
    step readme 60 "${privlab[@]}" attack --model cifar_vit_mjp27 --setting c --limit 1 \
      --attack patch-gradient --metrics psnr --device cpu --no-strips --out "$work/run"
  else
    bench deit_s 60 --model deit_s --images 512 --batch 256 --repeats 3 --no-searches
    bench vit_ti_160 120 --model vit_ti --img-size 160 --images 32 --batch 32 --repeats 3
    step search 90 "${card[@]}" search "$out/search.json" --device cuda
    step readme 150 "${privlab[@]}" attack --model deit_s_mjp --setting c --limit 4 --device cuda --out "$work/run" &
    step equality 200 "${card[@]}" equality "$out/equality.json" --device cuda --images 10 --seconds 180
    wait  # for readme, whose time does not count
    bench vit_b 90 --model vit_b --images 256 --batch 128 --repeats 2 --no-searches
  fi
  step limits 60 "${card[@]}" limits "$out/limits.json" --device "$device"
  "${card[@]}" table "$out"
}

run 2>&1 | tee "$out/log.txt"
! grep -qvP '\t0$' "$out/steps.tsv"
