#!/usr/bin/env bash
# A coordinator, a reviewer and two institutions in containers on this machine, and one run: an institution is
# the project chambers-court or chambers-consultation of institution.yml, with trial.yml.
# The folders court and consultation beside this file must contain data, as docs/deployment.md describes. As root:
#
#   MODEL=/models/qwen docker/trial.sh
set -euo pipefail
MODEL=$(realpath "$MODEL")
cd "$(dirname "$0")"
: "${TORCH_INDEX:=$(sed --quiet s/^TORCH_INDEX=//p .env 2> /dev/null || true)}" # as Compose reads it
export MODEL TORCH_INDEX
docker build --file Dockerfile --build-arg "TORCH_INDEX=$TORCH_INDEX" --tag chambers:0.1.0 ..
install --directory --owner=49999 coordinator reviewer court consultation

at() { # FOLDER COMMAND…: run chambers in an organisation's folder
    docker run --rm --add-host coordinator:host-gateway --volume "$PWD/$1:/srv/chambers" \
        --volume "$MODEL:/srv/chambers/model:ro" --entrypoint chambers chambers:0.1.0 "${@:2}"
}
coordinator() { # COMMAND…: run chambers beside the SuperLink
    docker compose --file coordinator.yml run --rm --volume "$PWD/coordinator:/srv/chambers" \
        --entrypoint chambers superexec "$@"
}

at coordinator site coordinator coordinator --model model
sed --in-place s/127.0.0.1/superlink/ coordinator/state/.flwr/config.toml
at reviewer site sign --key key --output release
cp --recursive reviewer/release coordinator
printf '%s\n' "FOLDER=$PWD/coordinator" "MODEL=$MODEL" "TORCH_INDEX=$TORCH_INDEX" > .env
docker compose --file coordinator.yml up --detach --wait
for name in court consultation; do
    cp coordinator/for-institutions/* reviewer/trusted.yaml "$name"
    at "$name" site join --name "$name" --coordinator coordinator:8443 --data data --model model \
        --wait 0 || test -e "$name/node.pub" # not admitted yet
    cp "$name/node.pub" "coordinator/$name.pub"
    coordinator site admit "$name.pub" --name "$name"
    FOLDER=$PWD/$name DATA=$PWD/$name/data docker compose --env-file "$name/institution.env" \
        --file institution.yml --file trial.yml up --detach
done
coordinator run run.toml train.local-steps=2
