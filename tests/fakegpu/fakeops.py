"""Run torch's CUDA operators on the CPU, over the device memory that libfakecuda.so makes.

torch imports this module at the end of its own import if FAKE_GPUS is set (build.sh sees to
that). It replaces the CUDA kernel of each operator by a function that views the tensors' memory
as CPU tensors, calls the operator on these and copies what it returns to new CUDA tensors.
Allocation, views and reading one number (SKIP) remain torch's own, over the fake runtime.

torch._fake_counts() returns the counters of libfakecuda.so, by name.
"""

import ctypes
import re
import warnings
from contextlib import suppress

import torch
from torch.utils._pytree import tree_map

lib = ctypes.CDLL(None)  # libfakecuda.so is preloaded
lib.fake_count.restype = ctypes.c_long
lib.fake_name.restype = ctypes.c_char_p

# These only touch metadata, allocate, or copy through the runtime: torch's own code is right.
SKIP = """
_assert_async _assert_async.msg _cudnn_init_dropout_state _efficientzerotensor _fused_sdp_choice
_has_compatible_shallow_copy_type _local_scalar_dense _pin_memory _reshape_alias _resize_output_
_to_copy alias as_strided detach empty.memory_format empty_strided is_pinned is_set_to record_stream
resize_ resize_as_ set_ set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor
unfold view view_as_complex view_as_real
copy_
"""  # copy_ is replaced by its own function below
SKIP = set(re.findall(r"\S+", SKIP))


def counts():
    """Return the counters of this process, by name."""
    out = {}
    while (name := lib.fake_name(len(out))) is not None:
        out[name.decode()] = lib.fake_count(len(out))
    return out


def host(tensor):
    """Return a CPU tensor over the memory of a CUDA tensor."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or (tensor.numel() == 0 and size < tensor.element_size()):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_byte * size).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    out = torch.empty(0, dtype=tensor.dtype)
    out.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())
    return out


def to_device(tensor, device):
    """Return a CUDA tensor with the strides and the values of a CPU tensor."""
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        offset = tensor.storage_offset() * tensor.element_size()
        available = tensor.untyped_storage().nbytes() - offset
        size = min(available, out.untyped_storage().nbytes())
        ctypes.memmove(out.data_ptr(), tensor.data_ptr(), size)
    return out


def seed_cpu_from(generator):
    """Seed the CPU's generator from a CUDA one, and advance that as a kernel would."""
    offset = generator.get_offset()
    torch.default_generator.manual_seed((generator.initial_seed() * 1000003 + offset) % 2**63)
    generator.set_offset(offset + 4)


def on_cpu(op):
    """Return the function that replaces an operator's CUDA kernel."""
    name = op.name()
    random = "nondeterministic_seeded" in str(op.tags)
    takes_cpu_tensors = "index" in name or "split" in name

    def kernel(*args, **kwargs):
        pairs = []  # (CUDA tensor, CPU tensor over its memory)
        device = None

        def convert(x):
            nonlocal device
            if isinstance(x, torch.device):
                device = device or x
                return torch.device("cpu")
            if isinstance(x, torch.Generator):
                return None
            if not isinstance(x, torch.Tensor):
                return x
            if x.is_cuda:
                # A tensor without dimensions may be on another device, as with the real kernels
                if x.dim() or device is None:
                    others = any(cuda.dim() for cuda, _ in pairs)
                    if x.dim() and others and device not in (None, x.device):
                        raise RuntimeError(
                            "Expected all tensors to be on the same device, but found "
                            f"{device} and {x.device} in {name}"
                        )
                    device = x.device
                pairs.append((x, host(x)))
                return pairs[-1][1]
            if x.dim() and x.device.type == "cpu" and not takes_cpu_tensors:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but got a cpu tensor of "
                    f"{tuple(x.shape)} in {name}"
                )
            return x

        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        cpu_args = tree_map(convert, args)
        cpu_kwargs = {key: tree_map(convert, value) for key, value in kwargs.items()}
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())

        cpu_state = torch.default_generator.get_state() if random else None
        if random:
            given = [a for a in [*args, *kwargs.values()] if isinstance(a, torch.Generator)]
            seed_cpu_from(given[0] if given else torch.cuda.default_generators[device.index])
        try:
            result = op(*cpu_args, **cpu_kwargs)
        finally:
            if cpu_state is not None:
                torch.default_generator.set_state(cpu_state)

        # An operator may resize its output: the CPU tensor then has memory of its own
        for x, h in pairs:
            if h.shape != x.shape:
                x.resize_(h.shape)
                dense = h.contiguous()
                if dense.numel():
                    size = dense.numel() * dense.element_size()
                    ctypes.memmove(x.data_ptr(), dense.data_ptr(), size)

        def convert_back(r):
            if isinstance(r, torch.Tensor):
                for x, h in pairs:
                    if r is h:  # in place, or given as `out`
                        return x
                if r.device.type == "cpu":
                    return to_device(r, device)
            return r

        return tree_map(convert_back, result)

    return kernel


def copy_(self, src, non_blocking=False):
    """Copy, and count what crosses between the CPU and a device."""
    if self.is_cuda != src.is_cuda and self.numel():
        cpu = src if self.is_cuda else self
        lib.fake_note(int(not self.is_cuda), int(cpu.is_pinned()), int(not non_blocking))
    target = host(self) if self.is_cuda else self
    target.copy_(host(src) if src.is_cuda else src)
    return self


library = torch.library.Library("aten", "IMPL")  # its kernels live as long as it does
with warnings.catch_warnings(action="ignore"):  # one for each replaced kernel
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or name in SKIP:
            continue
        base, _, overload = name.partition(".")
        with suppress(AttributeError, RuntimeError):  # what Python cannot call stays as it is
            if torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CUDA"):
                op = getattr(getattr(torch.ops.aten, base), overload or "default")
                library.impl(name, on_cpu(op), "CUDA", allow_override=True)
    library.impl("copy_", copy_, "CUDA", allow_override=True)
torch._fake_counts = counts
# The libraries' kernels have no CPU version. Without them, attention uses operators that have one.
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
