#!/usr/bin/env bash
# Runs the quick tests in rooms that differ as machines do, as root on Linux, and prints a table of outcomes:
#   tests/machines.sh [ROOM...]   with TESTS=tests/services/core for some of them
# odd: a proxy that refuses, LC_ALL=C, another TMPDIR, under nohup.
# Each room has a clone of the last commit and an environment of its own, in /var/tmp/grpo-rooms, which stay.
set -euo pipefail
cd "$(dirname "$0")/.."
all="bare whole system user space odd busy newest"
rooms=/var/tmp/grpo-rooms
root=$PWD
newest=$(ls -d "$HOME"/.pyenv/versions/3.1[2-9].*/bin/python /usr/bin/python3.1[2-9] 2> /dev/null | tail -1 || true)

# without PROGRAM... -- COMMAND: run a command for which the programs are missing.
without() {
  local hidden=""
  while [ "$1" != -- ]; do hidden="$hidden $(command -v "$1" || true)"; shift; done
  shift
  unshare --mount sh -c 'hidden=$1; shift; for p in $hidden; do mount --bind /dev/null "$p"; done; exec "$@"' sh "$hidden" "$@"
}

# clone FOLDER [PYTHON]: a clone with what `make test` installs.
clone() {
  [ -d "$1" ] || git clone -q "$root" "$1"
  git -C "$1" fetch -q "$root" HEAD && git -C "$1" checkout -q FETCH_HEAD
  make -C "$1" -j2 --no-print-directory PYTHON="${2:-python3}" .venv/.test .venv/.compiled .venv/.sky > "$1.set-up" 2>&1
}

room() {
  local folder=$rooms/clone run=(make --no-print-directory tests TESTS="${TESTS:-}")
  case $1 in
    user) folder=$rooms/home/clone ;;
    space) folder="$rooms/with a space/clone" ;;
    system | newest) folder=$rooms/$1/clone ;;
  esac
  mkdir -p "$(dirname "$folder")"
  case $1 in
    user)
      id grpo-tests > /dev/null 2>&1 || useradd --home-dir "$rooms/home" --shell /bin/bash grpo-tests
      chown -R grpo-tests "$rooms/home"
      run=(runuser -u grpo-tests -- env HOME="$rooms/home" PATH=/usr/local/bin:/usr/bin:/bin "${run[@]}")
      git config --global --get-all safe.directory | grep -qx "$folder" || git config --global --add safe.directory "$folder"
      clone "$folder" /usr/bin/python3
      chown -R grpo-tests "$rooms/home"
      ;;
    system) clone "$folder" /usr/bin/python3 ;;
    newest) clone "$folder" "$newest" ;;
    *) clone "$folder" ;;
  esac
  cd "$folder"
  case $1 in
    bare) without bwrap chromium chromium-headless-shell ip gcc cc node -- "${run[@]}" ;;
    odd)
      mkdir -p "$rooms/temporary"
      HTTP_PROXY=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9 http_proxy=http://127.0.0.1:9 ALL_PROXY=http://127.0.0.1:9 \
        LC_ALL=C LANG=C TMPDIR=$rooms/temporary nohup "${run[@]}"
      ;;
    busy) make --no-print-directory test-busy TESTS="${TESTS:-}" ;;
    *) "${run[@]}" ;;
  esac
}

printf '%-8s %-6s %8s  %s\n' room exit seconds outcome
for name in ${*:-$all}; do
  start=$SECONDS code=0
  (room "$name") > "$rooms.$name.log" 2>&1 < /dev/null || code=$?
  printf '%-8s %-6s %8s  %s\n' "$name" "$code" $((SECONDS - start)) "$(grep -E '[0-9]+ (passed|failed)' "$rooms.$name.log" | tail -1)"
done
