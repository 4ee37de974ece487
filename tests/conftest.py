"""What holds for every test: no network, properties without a deadline."""

from __future__ import annotations

import os

import hypothesis

os.environ["HF_HUB_OFFLINE"] = "1"

hypothesis.settings.register_profile("moesaic", deadline=None, print_blob=True)
hypothesis.settings.load_profile("moesaic")
