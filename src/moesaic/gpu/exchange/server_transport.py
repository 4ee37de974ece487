"""What an expert server on a GPU needs beside its listener, by its transport."""

from __future__ import annotations

from functools import partial

import torch

from moesaic.config import ExpertServerConfig
from moesaic.core.job_membership import JobMembership
from moesaic.experts.server_memory import ServerTransport
from moesaic.gpu.exchange.lifeline import lifeline_kind
from moesaic.gpu.exchange.mailbox import mailbox_kind
from moesaic.gpu.exchange.mailbox_answerer import MailboxAnswerer
from moesaic.gpu.ipc import device_sharing
from moesaic.gpu.ipc.device_calls import device_kind
from moesaic.gpu.ipc.device_rows import ServerRows
from moesaic.gpu.nvshmem import symmetric_heap
from moesaic.gpu.nvshmem.answerer import Inbox
from moesaic.gpu.nvshmem.job import NvshmemJob
from moesaic.kernels.table import MOST_RECORDED_ROWS


def server_transport(config: ExpertServerConfig, membership: JobMembership) -> ServerTransport:
    """The transport of a server whose rows stay on GPUs. membership: of this process."""
    device, hidden = torch.device(config.device), config.layout.hidden
    memory = ServerRows(device, hidden)
    if config.transport == "nvshmem":
        jobs = symmetric_heap.jobs(device)
        job = NvshmemJob(jobs, config.layout, MOST_RECORDED_ROWS, membership)
        return ServerTransport(memory, lifeline_kind(Inbox(job).accept), job)
    open_memory = device_sharing.sharing(device).open
    make_answerer = partial(MailboxAnswerer, open_memory=open_memory, hidden=hidden)
    return ServerTransport(memory, device_kind(open_memory) | mailbox_kind(make_answerer))
