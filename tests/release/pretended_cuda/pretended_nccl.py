"""A process group that only accepts device tensors, as NCCL does, and uses gloo on copies."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

NAME = "pretended"


class Done(dist._Work):
    def __init__(self, result):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def get_future(self):
        return self.future


def on_host(tensors):
    for tensor in tensors:
        if not tensor.is_cuda:
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    return [tensor.detach().cpu().clone() for tensor in tensors]


@torch.no_grad()
def put_back(tensors, copies):
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy)


class Group(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "nccl"

    def _through(self, tensors, call):
        copies = on_host(tensors)
        call(copies).wait()
        put_back(tensors, copies)
        return Done(tensors)

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        mean = opts.reduceOp == dist.ReduceOp.AVG
        if mean:
            opts.reduceOp = dist.ReduceOp.SUM
        done = self._through(tensors, lambda copies: self.gloo.allreduce(copies, opts))
        for tensor in tensors if mean else ():
            rounding = None if tensor.is_floating_point() else "trunc"
            tensor.copy_(torch.div(tensor, self.size(), rounding_mode=rounding))
        return done

    def allreduce_coalesced(self, tensors, opts=None):
        for tensor in tensors:
            each = dist.AllreduceOptions()
            each.reduceOp = opts.reduceOp if opts else dist.ReduceOp.SUM
            self.allreduce([tensor], each)
        return Done(tensors)

    def broadcast(self, tensors, opts=None):
        return self._through(tensors, lambda copies: self.gloo.broadcast(copies, opts or dist.BroadcastOptions()))

    def reduce(self, tensors, opts=None):
        return self._through(tensors, lambda copies: self.gloo.reduce(copies, opts))

    def allgather(self, outputs, inputs, opts=None):
        copies = [on_host(each) for each in outputs]
        self.gloo.allgather(copies, on_host(inputs)).wait()
        for each, copy in zip(outputs, copies, strict=True):
            put_back(each, copy)
        return Done(outputs)

    def all_gather_single(self, output, given, opts=None):
        self.allgather([list(output.view(self.size(), -1).unbind(0))], [given.reshape(-1)])
        return Done(output)

    _allgather_base = all_gather_single

    def barrier(self, opts=None):
        self.gloo.barrier().wait()
        return Done(None)


def plain(name):
    return NAME if name == "nccl" else name


def install():
    dist.Backend.register_backend(NAME, Group, devices=["cuda"])
    init, backend_of, make, place_of = (
        c10d.init_process_group, c10d.get_backend, c10d.new_group, c10d._get_object_coll_device,
    )  # fmt: skip

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        return init(plain(backend), *args, **kwargs)

    def new_group(ranks=None, timeout=None, backend=None, *args, device_id=None, **kwargs):
        return make(ranks, timeout, plain(backend), *args, **kwargs)

    def get_backend(group=None):
        name = backend_of(group)
        return "nccl" if name == NAME else name

    def object_device(group=None):
        return f"cuda:{torch.cuda.current_device()}" if backend_of(group) == NAME else place_of(group)

    c10d._get_object_coll_device = object_device
    torch.cuda.nccl.version = lambda: (2, 20, 0)
    for module in (c10d, dist):
        module.init_process_group, module.new_group, module.get_backend = init_process_group, new_group, get_backend
        module.is_nccl_available = lambda: True
    wrap = nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def wrap_and_wait(*args, **kwargs):
        # Lightning broadcasts the weights on a separate stream, and does not synchronize it with the first step.
        wrap(*args, **kwargs)
        torch.cuda.synchronize()

    nn.parallel.DistributedDataParallel.__init__ = wrap_and_wait


install()
