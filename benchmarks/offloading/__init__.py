"""What `offload.py` is made of. `ours`, `accelerated` and `llama` are programs of processes of their own."""
