"""The subjects that the many flags of `serve`, `run-batch` and `bench throughput` belong to, for their
help.

Question: In which group of the help is a flag?
"""

from __future__ import annotations

ESSENTIAL = (
    *(
        "--config",
        "--input-file",
        "--output-file",
        "--base-url",
        "--model",
        "--max-model-len",
        "--kv-cache-memory",
        "--max-num-seqs",
    ),
    *("--threads", "--kernels", "--attention-workers", "--expert-servers", "--min-replicas"),
    *("--tensor-parallel-size", "--fast-memory", "--host", "--port", "--api-key", "--served-model-name"),
    *("--models", "--max-loaded", "--idle-unload"),
    *("--num-prompts", "--input-len", "--output-len", "--json"),
)
"""What `--help` explains; `--help-all` explains every flag."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Files": ("--config", "--input-file", "--output-file", "--base-url", "--max-in-flight"),
    "Requests": (
        *("--num-prompts", "--input-len", "--output-len", "--random-range-ratio", "--mix", "--seed"),
    ),
    "Model": (
        *("--model", "--revision", "--hf-overrides", "--device", "--dtype", "--max-model-len"),
        *("--kernels", "--threads"),
        *("--pin-threads", "--mmap", "--enforce-eager", "--cudagraph-mode"),
    ),
    "Memory": (
        *("--kv-cache-memory", "--kv-cache-dtype", "--block-size", "--enable-prefix-caching"),
        *("--prefix-cache-dir", "--prefix-cache-disk"),
    ),
    "A model larger than memory": (
        *("--fast-memory", "--hardware", "--profile", "--offload-schedule", "--micro-batch-size"),
        *("--micro-batches", "--memory-division", "--hot-experts", "--pad"),
    ),
    "Batching": (
        *("--max-num-seqs", "--max-num-batched-tokens", "--prefill-step-ms", "--max-queue"),
        "--speculative-config",
    ),
    "Experts as services": (
        *("--attention-workers", "--prefill-workers", "--expert-servers", "--expert-capacities"),
        "--schedule",
        *(
            "--inflight-batches",
            "--combine",
            "--relay",
            "--queue-policy",
            "--queue-urgency",
            "--queue-history",
        ),
        *(
            "--expert-batch-pairs",
            "--expert-batch-wait",
            "--transport",
            "--nvshmem-pes",
            "--topology",
            "--numa",
            "--devices",
            "--paced",
            "--schedule-policy-file",
            "--cluster-address",
        ),
        *("--cluster-secret-file", "--standby-for", "--distributed-executor-backend"),
    ),
    "Faults and scaling": (
        *("--min-replicas", "--replica-timeout", "--redundant-experts", "--rebalance"),
        "--rebalance-interval",
        *("--autoscale", "--slo-ttft", "--slo-itl", "--unavailable-timeout"),
    ),
    "Ranks": (
        *("--tensor-parallel-size", "--nnodes", "--expert-tensor-parallel-size", "--moe-collectives"),
        *("--collectives-backend", "--data-parallel-size", "--enable-expert-parallel"),
    ),
    "Placement and prediction": ("--placement", "--dispatch", "--shuffle-align"),
    "Server": (
        *("--host", "--port", "--uds", "--served-model-name", "--chat-template"),
        *("--tool-call-parser", "--reasoning-parser", "--allow-special-tokens-in-content", "--strict-fields"),
        "--enable-tokenizer-info-endpoint",
    ),
    "Several models": ("--models", "--max-loaded", "--load-wait", "--idle-unload", "--preload"),
    "Access": (
        *("--api-key", "--admin-key", "--allowed-hosts", "--allowed-origins", "--allowed-methods"),
        *("--allowed-headers", "--allow-credentials"),
    ),
    "Connections": (
        *("--max-connections", "--timeout-header", "--timeout-body", "--timeout-keep-alive"),
        "--shutdown-timeout",
    ),
    "Observing": (
        *(
            "--log-level",
            "--access-log",
            "--disable-log-stats",
            "--metrics-prefix",
            "--otlp-traces-endpoint",
            "--trace",
            "--record-routing",
            "--record-routing-share",
        ),
        *("--record-routing-memory", "--json", "--debug"),
    ),
}
"""Subject -> its flags. Every flag of these commands is in one of them."""

GROUPED_FROM = 20
"""Commands with fewer flags than this, or with a flag that has no subject, show them in one list."""
