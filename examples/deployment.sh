#!/usr/bin/env bash
# A deployment on one machine, with the commands of docs/deployment.md: a coordinator, a reviewer and two
# institutions with generated data, each in a folder below FOLDER, one run, and what an institution can show.
#
#   MODEL=tiny examples/deployment.sh FOLDER
set -euo pipefail
MODEL=${MODEL:-tiny}
[ ! -e "$MODEL" ] || MODEL=$(realpath "$MODEL")
[ ! -e "$1" ] || { echo "$1 exists; name a folder that doesn't"; exit 2; }
mkdir -p "$1"/{coordinator,reviewer,court,consultation} && cd "$1"
export PYTHONUNBUFFERED=1

python - <<'END'
import json
from pathlib import Path

from finetuning.generated import examples

for name in ("court", "consultation"):
    folder = Path("data", name)
    folder.mkdir(parents=True)
    for part, count in (("train", 40), ("test", 8)):
        rows = examples(name, count, seed=1, split=part)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
END

at() { # ORGANISATION COMMAND…: print and run the command in the organisation's folder
    echo; echo "$1$ ${*:2}"
    cd "$1"; "${@:2}"; cd ..
}
programs=()
trap 'kill "${programs[@]}" 2> /dev/null; wait' EXIT
up() { # ORGANISATION: run its programs in the background
    echo; echo "$1$ chambers site up"
    (cd "$1" && exec chambers site up > up.log 2>&1) &
    programs+=($!)
}
await() { # PROCESS COMMAND…: wait until the command succeeds, or the process has ended
    until "${@:2}" > /dev/null 2>&1; do
        kill -0 "$1" 2> /dev/null || { echo "failed; the logs are in $PWD"; exit 1; }
        sleep 1
    done
}

at coordinator chambers site coordinator localhost --model "$MODEL"
at reviewer chambers site sign --key key --output release
cp -r reviewer/release coordinator
up coordinator
await "${programs[0]}" chambers site nodes --folder coordinator
for name in court consultation; do
    cp coordinator/for-institutions/* reviewer/trusted.yaml "$name"
    at "$name" chambers site join --name "$name" --coordinator localhost:8443 \
        --data "../data/$name" --model "$MODEL" &
    joining=$!
    programs+=("$joining")
    await "$joining" test -e "$name/node.pub"
    cp "$name/node.pub" "coordinator/$name.pub"
    at coordinator chambers site admit "$name.pub" --name "$name" --rows 40
    wait "$joining"
    up "$name"
done
at coordinator chambers run run.toml train.local-steps=2
at coordinator chambers site nodes
# What the court can show, and the run without it.
run=$(cd coordinator && echo state/.local/share/chambers/runs/*)
grep '"event": "audit"' "coordinator/$run/metrics.jsonl" > court/record.jsonl
head -1 data/court/train.jsonl > court/row.jsonl
at court chambers site audit --record record.jsonl
at court chambers site used row.jsonl
at court chambers site record
at coordinator chambers withdraw court --run "$run" --coordinator .
