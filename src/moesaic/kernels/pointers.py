"""Tensors over memory at an address, by DLPack: the standard form in which libraries pass tensors on."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.utils.dlpack

_CPU, _CUDA, _UNSIGNED = 1, 2, 1
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    """DLTensor of DLPack 0.x, which torch reads."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0.x. It has no deleter, so torch does not free the memory."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_keep = ctypes.pythonapi.Py_IncRef
_keep.restype, _keep.argtypes = None, [ctypes.py_object]


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """[size] uint8 at an address that `device` reads, without a copy. The caller keeps the memory alive.

    The tensor says that it is on `device`, also where the memory belongs to another GPU. About a hundred
    bytes of the host are never freed, since torch looks at them when the last view of the tensor goes.
    """
    return torch.utils.dlpack.from_dlpack(capsule_at(address, size, device))


def capsule_at(address: int, size: int, device: torch.device) -> Any:
    """A DLPack capsule of such a tensor."""
    shape = (ctypes.c_int64 * 1)(size)
    # DLPack lets a consumer look at this structure until the last view has gone. Nobody says when that is.
    dlpack_device = _Device(_CUDA if device.type == "cuda" else _CPU, device.index or 0)
    managed_tensor = _ManagedTensor(
        _Tensor(address, dlpack_device, 1, _Type(_UNSIGNED, 8, 1), shape, None, 0), None, None
    )
    for structure in (managed_tensor, shape):
        _keep(structure)
    return _new(ctypes.addressof(managed_tensor), _NAME, None)
