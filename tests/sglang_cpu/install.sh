#!/usr/bin/env bash
# Installs the real SGLang for a machine without a GPU into the virtual environment DIR, once: about 3 GB, some minutes.
# For tests only. SGLang does not support this combination: its CUDA packages are left out, and shims/ stands in for
# what would be looked up in them at import. DIR/bin/sglang-python is the interpreter to give as SGLANG_PYTHON.
set -euo pipefail
dir=${1:?usage: install.sh DIR}
here=$(cd "$(dirname "$0")" && pwd)
version=0.5.23
[ -x "$dir/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir"
dir=$(cd "$dir" && pwd)
cat > "$dir/bin/sglang-python" <<WRAPPER
#!/bin/sh
# Written by tests/sglang_cpu/install.sh.
export PYTHONPATH="$here/shims" SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
exec "$dir/bin/python" "\$@"
WRAPPER
chmod +x "$dir/bin/sglang-python"
[ "$(cat "$dir/.sglang-version" 2>/dev/null)" = "$version" ] && exit 0

install() { "$dir/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
# The trainer's torch; sglang's own pin is one with CUDA.
install torch==2.13.0 numpy
install --no-deps "sglang==$version"
# What sglang imports on its way to the CPU path, taken from its metadata, without flashinfer, nvidia-* and torchaudio.
install torch==2.13.0 transformers==5.19.0 openai==2.8.0 openai-harmony==0.0.4 outlines==0.1.11 blobfile==3.0.0 \
  xgrammar==0.2.8 'llguidance<2,>=1.7.6' 'mistral_common>=1.11.5' 'anthropic>=0.20' 'kernels<0.15,>=0.14.1' \
  aiohttp compressed-tensors datasets distro easydict einops fastapi gguf interegular IPython modelscope msgspec ninja \
  orjson packaging partial_json_parser pillow prometheus-client psutil py-spy pybase64 pydantic python-multipart pyzmq \
  regex requests scipy sentencepiece setproctitle smg-grpc-servicer soundfile tiktoken tokenizers tqdm uvicorn uvloop \
  watchfiles xxhash zstandard
install --no-deps torchvision==0.28.0

"$dir/bin/sglang-python" -c 'import sglang.srt.server_args'
echo "$version" > "$dir/.sglang-version"
