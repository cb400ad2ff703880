#!/bin/sh
# Start a second ComfyUI that does nothing but decode, apart from any other: one GPU, loopback only, no custom nodes but
# ours, its own temp and user folders (a ComfyUI empties its temp folder at every start, another's too if they share it).
#
#   start-decoder.sh COMFYUI_FOLDER [GPU]
#
# COMFYUI_PYTHON  the Python that ComfyUI runs in (default: COMFYUI_FOLDER/venv/bin/python, else python3)
# DECODER_PORT    default 8192
# DECODER_STATE   where its temp and user folders go (default: ~/.cache/h3spool/comfyui-PORT)
# What follows the GPU goes to ComfyUI as it is: start-decoder.sh ~/ComfyUI 1 --max-upload-size 200
set -eu

comfyui=${1:?usage: start-decoder.sh COMFYUI_FOLDER [GPU] [ComfyUI options]}
gpu=${2:-0}
shift
[ $# -eq 0 ] || shift
port=${DECODER_PORT:-8192}
state=${DECODER_STATE:-${XDG_CACHE_HOME:-$HOME/.cache}/h3spool/comfyui-$port}
python=${COMFYUI_PYTHON:-$comfyui/venv/bin/python}
[ -x "$python" ] || python=python3
mkdir -p "$state/user"

cd "$comfyui"
CUDA_VISIBLE_DEVICES=$gpu
export CUDA_VISIBLE_DEVICES
exec nice -n 5 "$python" main.py \
    --listen 127.0.0.1 --port "$port" \
    --disable-all-custom-nodes --whitelist-custom-nodes h3_latent_handoff \
    --disable-api-nodes --disable-metadata --dont-print-server \
    --temp-directory "$state" --user-directory "$state/user" --database-url "sqlite:///$state/comfyui.db" "$@"
