#!/usr/bin/env bash
# train_mini.sh DATA OUT first|clips: one slice of veo-mini's training on one or two GPUs, each under ten minutes.
# `first` trains everything from nothing; `clips` goes on from DATA/veo-mini.safetensors. Weights come in parts of
# 15 MB (join them with cat), pictures beside them. The recipe itself is veo_core/train/mini.py.
set -euo pipefail
data=$(realpath "$1"); out=$(realpath "$2"); slice=$3
package=$(mktemp -d); ln -s "$(pwd)" "$package/comfyui_veostyle"
export PYTHONPATH=$package PYTHONUNBUFFERED=1
work=$(mktemp -d); cd "$work"

train() {  # GPU NAME STAGES RESUME
  CUDA_VISIBLE_DEVICES=$1 python3 -c "
import torch; from pathlib import Path; from comfyui_veostyle.veo_core.train.mini import train
train(Path('$data'), Path('$2.safetensors'), $3, torch.device('cuda'), resume=$4)"
}

gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
if [ "$slice" = first ]; then
  train $((gpus - 1)) flow "{'flow': ${FLOW:-400}}" None > flow.log 2>&1 &
  train 0 veo-mini "{'autoencoder': ${AUTOENCODER:-180}, 'distil': ${DISTIL:-170}, 'style': ${STYLE:-150}}" None 2>&1 | tee main.log
  wait; tail -n 3 flow.log
  python3 -c "
from safetensors.torch import load_file, save_file
a, b = load_file('veo-mini.safetensors'), load_file('flow.safetensors')
save_file(a | {k: v for k, v in b.items() if k.startswith('flow.')}, 'veo-mini.safetensors')"
else
  # What these stages leave as it was need not travel back.
  train 0 veo-mini "{'style': ${STYLE:-130}, 'clips': ${CLIPS:-380}}" "Path('$data/veo-mini.safetensors')" 2>&1 | tee main.log
  python3 -c "
from safetensors.torch import load_file, save_file
kept = {k: v for k, v in load_file('veo-mini.safetensors').items() if not k.startswith(('flow.', 'predictor.', 'autoencoder.encoder.'))}
save_file(kept, 'veo-mini.safetensors')"
fi
cat main.log flow.log > "$out/log" 2>/dev/null || true
split -b 15M veo-mini.safetensors "$out/part_"
cp ./*.jpg "$out/"
