"""The curves by which a worker decides which of its rows run alone (`policy.scheduling.minimum_batch`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from moesaic.config import WorkerConfig
from moesaic.core import curves, paced
from moesaic.core.curves import DeviceCurves
from moesaic.core.experts import ExpertLayout
from moesaic.cost.curves import of_device
from moesaic.experts import measuring
from moesaic.policy.scheduling.minimum_batch import cpu_curves
from moesaic.runtime.model_loading import LoadedModel


def choose_curves(config: WorkerConfig, loaded_model: LoadedModel, layout: ExpertLayout) -> DeviceCurves:
    """The curves of the modelled device, of the file that is given, or of the device that computes.

    A GPU that is not known has those of a CPU, but shares nothing.
    """
    if config.paced is not None:
        return paced.read(Path(config.paced)).curves
    if config.policy_file is not None:
        return curves.read(Path(config.policy_file))
    model, size = loaded_model.model, torch.empty(0, dtype=loaded_model.dtype).element_size()
    other_parameters = replace(model, experts={}).num_bytes / size / model.spec.num_layers
    expert = 3.0 * layout.hidden * layout.width
    if loaded_model.device.type != "cuda":
        return cpu_curves(expert, other_parameters, loaded_model.threads, _ratio(loaded_model))
    device_curves = of_device(torch.cuda.get_device_name(loaded_model.device), expert, other_parameters, size)
    return device_curves or replace(cpu_curves(expert, other_parameters), shared=False)


def _ratio(loaded_model: LoadedModel) -> float | None:
    """Rows for which the LM head is computed for as long as its weights are read."""
    model = loaded_model.model

    def run(rows: int) -> None:
        with torch.inference_mode():
            model.logits(torch.full((rows, model.spec.hidden_size), 0.01, device=loaded_model.device))

    sizes = tuple(model.head.shape)
    conditions = {"kernels": loaded_model.kernels.name, "threads": loaded_model.threads, "sizes": sizes}
    return measuring.measure_ratio(run, {**conditions, "type": str(loaded_model.dtype)})
