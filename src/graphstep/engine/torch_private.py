"""The only place that touches private torch interfaces, each with a fallback.

Checked on torch 2.11 (CUDA) and 2.13 (CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

_POST_ACCUMULATE_HOOKS_OF: Final = attrgetter("_post_accumulate_grad_hooks")
_SENDS_BUFFERS: Final = "require_forward_param_sync"
OF_DATA_PARALLEL: Final = frozenset({_SENDS_BUFFERS, "modules_buffers", "named_module_buffers"})
"""Attributes in which DistributedDataParallel notes what kind of forward was the last, and lists buffers anew."""
_TIMED_EVERY, _NEVER_TIMED = 100, 2**31 - 1  # Of how many forwards DistributedDataParallel times one; torch's default.
Switch = tuple[Callable[[], Any], Callable[..., None]]


def storage_key(tensor: Tensor) -> int:
    """Identity of the tensor's storage, valid while the storage is alive.

    Unlike an address it also tells empty storages apart.
    """
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
    key = getattr(storage, "_cdata", None)
    return int(key) if key is not None else storage.data_ptr()


def unwraps_itself(types: Any) -> bool:
    """True if one of the types handles its own operations: its inner tensors come to a dispatch mode afterwards."""
    return any(
        issubclass(kind, Tensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types or ()
    )


def post_accumulate_hooks(parameter: Tensor) -> tuple[Any, ...]:
    """The hooks that run after a gradient was accumulated into this parameter."""
    return tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def any_post_accumulate_hooks(parameters: Sequence[Tensor]) -> bool:
    """True if one of these has such hooks. Cost: less than 0.1 microseconds a parameter if not."""
    if not hasattr(Tensor, "_post_accumulate_grad_hooks"):
        return any(map(post_accumulate_hooks, parameters))
    return any(map(_POST_ACCUMULATE_HOOKS_OF, parameters))


def plain_alias(tensor: Tensor) -> Tensor:
    """A detached tensor over the same memory, of the plain class: no function mode and no subclass hears of it."""
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def generator_key(generator: torch.Generator) -> int:
    """Identity of a generator: operations are handed another Python object than the one that the user made."""
    return int(getattr(generator, "_cdata", id(generator)))


def is_composite(operation: Any) -> bool:
    """True for an operation that is made of others. Below autograd (inference mode) it is dispatched undivided."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operation.name()
    return bool(has_kernel(name, "CompositeImplicitAutograd")) and not has_kernel(name, "CPU")


def call_kernel(operation: Any, args: Any, kwargs: Any) -> Any:
    """Call an operation's CPU kernel itself: unlike a plain call this lets the active modes see what it does inside."""
    for key in ("CPU", "CompositeExplicitAutograd"):
        # Only a key for which the kernel was registered itself: others crash the process.
        if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key):
            return operation._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
    return operation(*args, **kwargs)


def dense_kernel(operation: Any) -> Any:
    """The plain implementation of a higher-order operator, or ``None``."""
    kernels = getattr(operation, "py_kernels", {})
    return kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """True for what ``torch.func`` puts around a tensor while it transforms a function."""
    check = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
    return check is not None and bool(check(tensor))


def has_plain_memory(tensor: Tensor) -> bool:
    """True for a tensor that is one strided piece of memory: not sparse, nested, quantised or opaque."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def all_bytes(of: Tensor | torch.UntypedStorage) -> Tensor:
    """The whole of a storage, or of that of a tensor, as bytes over the same memory. It can be written in any mode."""
    storage = of.untyped_storage() if isinstance(of, Tensor) else of
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target: one kernel where torch has one for many tensors."""
    copy = getattr(torch, "_foreach_copy_", None)
    with torch.no_grad():
        if copy is not None and len(targets) > 1:
            copy(list(targets), list(sources))
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


class WeakStorage:
    """Holds a storage's identity without its memory: as long as this lives, no other storage gets the same key."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        is_known = hasattr(storage, "_weak_ref") and hasattr(storage, "_new_with_weak_ptr")
        # Without weak references the storage itself is kept: more memory, same meaning.
        self._held: Any = StorageWeakRef(storage) if is_known else storage

    def is_gone(self) -> bool:
        """True once the memory has been freed; never where torch has no weak references."""
        return isinstance(self._held, StorageWeakRef) and bool(self._held.expired())

    def as_bytes(self) -> Tensor | None:
        """The whole storage as bytes, which hold it from now on; ``None`` once the memory has been freed."""
        is_weak = isinstance(self._held, StorageWeakRef)
        storage = torch.UntypedStorage._new_with_weak_ptr(self._held.cdata) if is_weak else self._held
        return None if storage is None else all_bytes(storage)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run ATen operations directly: no autograd, no version counting, no autocast.

    Tensors made in inference mode can be written there. Falls back to ``no_grad`` and a disabled autocast, which differ
    in speed, in bumping version counters and in refusing to write such tensors.
    """
    below = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
    exclude = getattr(torch._C, "_ExcludeDispatchKeyGuard", None)
    no_autocast = getattr(torch._C, "_DisableAutocast", None)
    with (
        torch.no_grad(),
        below() if below is not None else nullcontext(),
        exclude(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))
        if exclude is not None
        else nullcontext(),
        no_autocast() if no_autocast is not None else torch.autocast("cpu", enabled=False),
    ):
        yield


def work_is_pending(result: Any) -> bool:
    """True for the handle that an asynchronous collective returns."""
    has_method = getattr(result, "_has_method", None)
    return isinstance(result, torch.ScriptObject) and has_method is not None and bool(has_method("wait"))


def borrowed_cuda_view(tensor: Tensor) -> Tensor:
    """A CUDA tensor over the same memory that does not own it: same sizes, strides and dtype, no gradient history."""
    from_pointer = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    storage = tensor.untyped_storage()
    if from_pointer is not None:
        borrowed = from_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())
    raw = torch.as_tensor(_CudaBytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class _CudaBytes:
    """Raw device memory, described by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


@contextmanager
def stale_streams_overridden() -> Iterator[None]:
    """Let a captured backward pass use nodes that an eager one made on another stream, where torch knows how to.

    Older versions refuse such a capture. The setting is the process's; it is put back.
    """
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if override is None:
        yield
        return
    override(True)
    try:
        yield
    finally:
        override(False)


def backward_pass() -> int | None:
    """A number for the backward pass that this thread is in; ``None`` outside of one or where torch does not tell."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if current is None else int(current())
    return None if number < 0 else number


def switch(reads: str, writes: str) -> tuple[Switch, ...]:
    """What asks for a switch of a library and what sets it, by their names; empty where torch does not have it.

    Where torch cannot set it, that does nothing.
    """
    get = getattr(torch._C, reads, None)
    return ((get, getattr(torch._C, writes, lambda *_values: None)),) if get is not None else ()


def choose_attention(*tensors: Tensor) -> None:
    """Have torch choose the kernel of an attention call with these, without the call; nothing where it cannot."""
    getattr(torch, "_fused_sdp_choice", lambda *_tensors: None)(*tensors)


def saved_tensors_are_taken() -> bool:
    """Whether somebody takes what autograd saves in this thread: activation recompute, or offloading to the host."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def weights_are_cached() -> bool:
    """True inside ``torch.nn.utils.parametrize.cached()``: parametrized weights are computed once for several calls."""
    return bool(getattr(parametrize, "_cache_enabled", 0))


@contextmanager
def no_weights_cached() -> Iterator[None]:
    """Compute parametrized weights anew in the body, and keep none of them for what comes after it."""
    enabled = getattr(parametrize, "_cache_enabled", 0)
    if enabled:
        parametrize._cache_enabled = 0
    try:
        yield
    finally:
        if enabled:
            parametrize._cache_enabled = enabled


def will_accumulate(node: Any) -> bool:
    """Whether the backward pass under way reaches the leaf of this node: not so in ``autograd.grad``, for example."""
    query = getattr(torch._C, "_will_engine_execute_node", None)
    return True if query is None else bool(query(node))


class HolderCount:
    """Counts what holds the storages of some tensors: tensors, views, autograd. The tensors must outlive this object.

    Where torch does not tell, the count is always the same.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        count = getattr(torch._C, "_storage_Use_Count", None)
        self._count: Callable[[int], int] = count if count is not None else _zero
        self._keys = [tensor.untyped_storage()._cdata for tensor in tensors] if count is not None else []

    @classmethod
    def joined(cls, counts: Iterable[HolderCount]) -> HolderCount:
        """Several as one."""
        made = cls(())
        made._keys = [key for each in counts for key in each._keys]
        return made

    def now(self) -> list[int]:
        """The counts at this moment."""
        return list(map(self._count, self._keys))


def _zero(_key: int) -> int:
    return 0


def transforms_are_active() -> bool:
    """True inside ``torch.func`` transforms and forward-mode gradients, which see through no replay."""
    check = getattr(torch._C, "_are_functorch_transforms_active", None)
    level = getattr(torch.autograd.forward_ad, "_current_level", -1)
    return level >= 0 or (check is not None and bool(check()))


def capture_is_under_way() -> bool:
    """True if this thread's work is being captured, by whomever."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # A build without CUDA has a stub here, unless a tape is being recorded.
        return False


def gradients(
    outputs: Sequence[Tensor] | Sequence[GradientEdge],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
    *,
    keep_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=keep_graph, allow_unused=True)``.

    That function imports a symbolic-algebra package (seconds) to compare shapes, which here are known to be equal.
    """
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None or not inputs:
        return torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=keep_graph, allow_unused=True)
    found: tuple[Tensor | None, ...] = run(
        tuple(outputs), tuple(grad_outputs), keep_graph, False, tuple(inputs), True, accumulate_grad=False
    )
    return found


def layout_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A fast check that tensors have the class, dtype, device, sizes, strides and ``requires_grad`` that these have.

    It is given them as its arguments. It also says no where modes such as autocast are not those of this moment.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    kind = getattr(guards, "TensorGuards", None)
    if kind is None or not tensors:
        return None
    try:
        check: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (TypeError, RuntimeError):
        return None
    return check


def node_number(node: Any) -> int | None:
    """The place of an autograd node in the order in which its thread made them; ``None`` for one that gathers the
    gradient of a leaf, and where torch does not tell."""
    number = getattr(node, "_sequence_nr", None)
    if number is None or hasattr(node, "variable"):
        return None
    return int(number())


def data_parallel_is_active() -> bool:
    """True inside the forward of a module that is wrapped in DistributedDataParallel."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


@contextmanager
def no_data_parallel_timings(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep DistributedDataParallel from timing a forward in the body, for which the host waits: not under capture.

    It times one of a hundred; the body is not one of them. And it sends buffers round, as in every forward of training
    but the first after an evaluation.
    """
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    for wrapper in wrappers:
        setattr(wrapper, _SENDS_BUFFERS, True)
    setters = [getattr(wrapper, "_set_ddp_runtime_logging_sample_rate", None) for wrapper in wrappers]
    for set_rate in filter(None, setters):
        set_rate(_NEVER_TIMED)
    try:
        yield
    finally:
        for set_rate in filter(None, setters):
            set_rate(_TIMED_EVERY)


def has_fp8_matmul(device: torch.device) -> bool:
    """Whether torch multiplies fp8 matrices on this device by itself. On the CPU it does so in wider numbers."""
    if not hasattr(torch, "_scaled_mm"):
        return False
    # AMD's devices have formats of their own.
    return device.type == "cpu" or (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def fp8_matmul(
    left: Tensor,
    right: Tensor,
    inverse_left: Tensor,
    inverse_right: Tensor,
    *,
    dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    """``(left * inverse_left) @ (right * inverse_right).T`` in ``dtype``, for fp8 matrices.

    Where the device has no such product they are multiplied as float32 numbers.

    Args:
        left: [M, K], contiguous; K is a multiple of 16.
        right: [N, K], contiguous; N is a multiple of 16.
        inverse_left: float32 scalar: what one means.
        inverse_right: likewise.
        dtype: of the result.
        is_fast: may sum less precisely, where the device knows a faster way.
    """
    has_kernel = has_fp8_matmul(left.device)
    if has_kernel and left.device.type == "cuda":
        # cuBLAS reads scales from multiples of 16 bytes only, and says that the product is not supported.
        inverse_left, inverse_right = (s.clone() if s.data_ptr() % 16 else s for s in (inverse_left, inverse_right))

    def product() -> Tensor:
        if not has_kernel:
            return ((left.float() * inverse_left) @ (right.float() * inverse_right).t()).to(dtype)
        found: Tensor = torch._scaled_mm(
            left, right.t(), scale_a=inverse_left, scale_b=inverse_right, out_dtype=dtype, use_fast_accum=is_fast
        )
        return found

    if has_kernel and left.device.type == "cuda":
        return product()
    # The operations that it is made of elsewhere would be cast to the numbers of autocast.
    with torch.autocast(left.device.type, enabled=False):
        return product()


def global_module_hooks() -> tuple[Mapping[int, Any], ...]:
    """The hooks that run at every call of every module; empty where torch keeps them elsewhere."""
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    found = [getattr(torch.nn.modules.module, f"_global_{kind}", None) for kind in kinds]
    return tuple(hooks for hooks in found if hooks is not None)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in one kernel where the device knows how to."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda" and total.dtype == torch.float32:
        # Half-precision products into float32, rounded once; the overload has no public name on other devices.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)


def after_backward_pass(action: Callable[[], None]) -> None:
    """From within a backward pass: do this at its end. At once where torch does not know how."""
    queue = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)
    if queue is None:
        action()
    else:
        queue(action)


def is_dispatch_watched() -> bool:
    """Whether dispatch modes are on in this thread; ``True`` where torch does not tell."""
    number = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return number is None or number() > 0


def current_node() -> Any:
    """The node that the backward pass under way is at; ``None`` outside of one, and where torch does not tell."""
    current = getattr(torch._C, "_current_autograd_node", None)
    return None if current is None else current()


def forward_trace() -> list[str]:
    """In a backward with anomaly detection on: the stack of the forward that the current node belongs to."""
    node = current_node()
    return list(node.metadata.get("traceback_", ())) if node is not None else []


def has_default_device() -> bool:
    """Whether tensors without a named device lie on one that was set (``set_default_device``)."""
    held = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    return getattr(held, "device_context", None) is not None
