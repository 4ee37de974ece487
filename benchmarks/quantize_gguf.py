"""Quantises a GGUF file with llama.cpp. Runs in the environment that `setup_peer.sh llama` makes.

DIR/bin/python benchmarks/quantize_gguf.py /tmp/qwen-bf16.gguf /tmp/qwen-q4_0.gguf q4_0
"""

from __future__ import annotations

import argparse
from pathlib import Path

TYPES = {
    "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12,
    "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25,
    "iq4_xs": 30, "iq3_xxs": 23, "iq3_s": 26, "tq1_0": 36, "tq2_0": 37, "mxfp4_moe": 38, "bf16": 32,
}  # fmt: skip
"""Name -> llama.cpp's number of the file type. Smaller IQ types need an importance matrix."""


def main() -> None:
    """Runs the command."""
    import llama_cpp.llama_cpp as llama  # type: ignore[import-not-found]  # where only TYPES is read it is missing

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a GGUF file in bf16 or float32")
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("type", choices=TYPES)
    given = parser.parse_args()
    params = llama.llama_model_quantize_default_params()
    params.ftype = TYPES[given.type]
    written = given.file.with_suffix(".part")
    status = llama.llama_model_quantize(str(given.source).encode(), str(written).encode(), params)
    if status:
        raise SystemExit(f"llama_model_quantize: {status}")
    written.rename(given.file)


if __name__ == "__main__":
    main()
