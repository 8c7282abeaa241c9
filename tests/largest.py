"""The size of the largest tensor that a piece of code makes, and of all that it holds at once."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


class LiveTensors(TorchDispatchMode):
    """Records the most bytes that the results of operators held at once, those apart that are views of ``ignored``."""

    def __init__(self, ignored):
        super().__init__()
        self.ignored = {x.untyped_storage().data_ptr() for x in ignored}
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                storage = _inner(x).untyped_storage()
                if storage.data_ptr() not in self.ignored:
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return result


def _inner(x):
    """The plain tensor in a wrapper, such as that of a collective which is under way."""
    while is_traceable_wrapper_subclass(x):
        (name, *_), _ = x.__tensor_flatten__()
        x = getattr(x, name)
    return x
