#!/bin/sh
# The main job on one machine: two clips from a sampler's spool to a decoder's, decoded, and fetched back.
#   make demo            (or: demo.sh [FOLDER], where the results go)
set -eu
demo=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
out=${1:-demo-out}
rm -rf "$out"
mkdir -p "$out"
out=$(CDPATH='' cd -- "$out" && pwd)
export H3SPOOL_VIDEO_VAE="$demo/demo_video_vae.safetensors" H3SPOOL_AUDIO_VAE="$demo/demo_audio_vae.safetensors"
step() { echo; echo "\$ $*"; "$@"; }

echo "A latent of 124 frames, 736x416, is made (a test card through the demo's own encoder); the small one is in the repository."
python "$demo/test_card.py" "$out/test-card.h3latent"

step h3spool init "$out/sampler" --role sampler --node sampler
step h3spool init "$out/decoder" --role decoder --node decoder
step h3spool export "$demo/demo.h3latent" --name "Test card, small" --spool "$out/sampler" --min-free 0
step h3spool export "$out/test-card.h3latent" --name "Test card 測試卡" --spool "$out/sampler" --min-free 0
step h3spool loop --once --spool "$out/sampler" --to "$out/decoder" --min-free 0
step h3spool loop --once --spool "$out/decoder" --deliver "$out/videos" --min-free 0
step h3spool pull --spool "$out/sampler" --from "$out/decoder" --min-free 0

newest=$(find "$out/decoder/done" -mindepth 1 -maxdepth 1 | sort | tail -n 1)
step h3spool status --spool "$out/decoder" "$(basename "$newest")"
echo
echo "The MP4s:"
find "$out/videos" -name '*.mp4'
