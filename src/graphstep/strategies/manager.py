"""Graphs that a model's modules own: observed in the first step, captured after it, replayed from then on."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from graphstep.capture.chain import Chain, Handover
from graphstep.capture.chain_run import ChainRun
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.lanes import Lanes
from graphstep.capture.left_tensors import as_before
from graphstep.capture.manifest import ATTACH_AGAIN, Watched, verify
from graphstep.capture.plan import Key, Plan, PlanObserver
from graphstep.capture.reasons import EagerReason
from graphstep.capture.region import Region
from graphstep.capture.report import CaptureReport, EagerPart
from graphstep.capture.session import GraphSession
from graphstep.capture.shared_copies import note_shared_copies
from graphstep.capture.signature import Signature
from graphstep.config import CapturePolicy, CudaGraphConfig, CudaGraphImpl, MismatchPolicy
from graphstep.errors import CaptureError, ConfigError, StaleAddressError
from graphstep.native.build import Build
from graphstep.strategies.boundary import StepBoundary
from graphstep.strategies.capture_failures import OR_EAGERLY, CaptureFailures, cause
from graphstep.strategies.captured_chains import CapturedChains
from graphstep.strategies.eager_parts import eager_parts, in_no_layer
from graphstep.strategies.found_layers import found_layers
from graphstep.strategies.local_calls import RegionCalls
from graphstep.strategies.local_capture import Order, RegionFailedError, capture_chains, gradients_through_autograd
from graphstep.strategies.local_forward import graphs_left_out
from graphstep.strategies.local_layers import GraphedModule, Named, graphed_layers, graphed_modules
from graphstep.strategies.local_observed import ObservedCalls
from graphstep.strategies.local_problems import modules_and_regions, nothing_to_capture, other_strategy
from graphstep.strategies.relays import add_relay, add_starts
from graphstep.strategies.settled import settle, tensors_kept

_MAX_COUNTED: Final = 64
"""Signatures of a region that are counted while they have no graphs."""
_MAX_UNCHECKED: Final = 256
"""Calls after which addresses are checked although something is in flight: it may be so for ever."""


class CudaGraphManager:
    """Captures chosen modules of a model, and replays them whenever the model is called as at capture.

    The training loop stays as it is. The first training step runs eagerly and is observed: in which order forwards and
    backwards come, over all microbatches. The capture follows when the step is over: at :meth:`end_step`, or at the
    first call after the weights have been updated. Later steps replay. A call that no graph serves runs eagerly and is
    counted with its reason; evaluation (grad mode or training flags off) always does, because a graph captured in
    training is never used for it. Inputs of a further signature, and more microbatches in flight than before, are
    captured as well when they come back.

    While this object is open, the ``forward`` of each captured module is replaced on the instance; :meth:`close` puts
    it back. Hooks on a captured module and on parameters run as always; hooks on modules inside a captured one run when
    it is captured and not when it is replayed: what they compute is in the graph. Hooks that are put on a result of a
    module after its next neighbour has run see no gradient; put them on before, or in a forward hook.

    Args:
        model: the whole model as the loop calls it, wrappers such as DistributedDataParallel included.
        config: what to capture and how; ``impl`` is ``local``, or ``none`` for nothing. By default whole
            layers.
        regions: for modules that do not declare segments: path pattern to kind, ``{"layers.*": "layer"}``. A ``*``
            matches within one step of a path. The whole forward of each matching module is captured: tensors in any
            nesting, all other arguments part of the signature. Modules with segments are then captured by this only.
        session: owner of the graphs; by default a new one on the device of the first parameter. It is closed with this
            object.
        is_automatic: capture when the weights have been updated; else at :meth:`end_step` only.

    Raises:
        ConfigError: nothing in the model can be captured (with the policy ``auto`` a warning); ``impl`` is another
            strategy's; ``modules`` and ``regions`` are both given; a pattern matches nothing, or a region lies within
            another; a layer computes something else than its segments, or another strategy has captured the model.

    Calls of a captured module, and backwards through it, may raise:

    * StaleAddressError: a weight, buffer or gradient has moved since the capture.
    * InputMismatchError: another signature, with ``on_mismatch='error'``.
    * CaptureError: a call under activation recompute, with the policy ``required``; or see :meth:`end_step`.
    * LifecycleError: a backward that the graphs cannot give: a second one, one towards chosen tensors, one after a
      result was changed in place or a hook was put on a parameter, or one that would overwrite a gradient that is kept
      through an alias.
    """

    _impls: ClassVar[frozenset[CudaGraphImpl]] = frozenset({CudaGraphImpl.local, CudaGraphImpl.none})
    """What a configuration may ask for."""

    def __init__(
        self,
        model: nn.Module,
        config: CudaGraphConfig | None = None,
        *,
        regions: Mapping[str, str] | None = None,
        session: GraphSession | None = None,
        is_automatic: bool = True,
    ) -> None:
        self._config = config if config is not None else CudaGraphConfig(impl=CudaGraphImpl.local)
        if self._config.impl not in self._impls:
            (wanted,) = self._impls - {CudaGraphImpl.none}
            raise ConfigError(other_strategy(self._config.impl, wanted))
        self.session = session if session is not None else GraphSession(_device_of(model))
        self.device_type = self.session.device.type
        self.on_mismatch: MismatchPolicy = self._config.on_mismatch
        self.is_debugging = self._config.debug
        self.is_data_parallel = False
        self.is_required = self._config.policy is CapturePolicy.required
        self.is_capturing = False
        self.observer: PlanObserver | None = PlanObserver()
        self.observed = ObservedCalls()
        self._model = model
        self._is_automatic = is_automatic
        self._boundary = StepBoundary(model.parameters())
        self._build = Build(os.environ)
        self._is_built_later = self._build.is_under_way
        self._watched: Watched | None = None
        self._watched_of: WeakKeyDictionary[Chain, Watched] = WeakKeyDictionary()
        self._lanes = Lanes()
        self._chains = CapturedChains(self._config.max_signatures, self._config.capture_after)
        self._hits: Counter[tuple[Region, Signature]] = Counter()
        self._num_open = 0
        self._num_unchecked = 0
        self._apart: Mapping[Region, int] = {}
        """See :class:`Order`."""
        self._eager_parts: tuple[EagerPart, ...] = ()
        self._modules = self._find(regions)
        if self._config.modules and self._modules and not self._eager_parts:
            self._eager_parts = eager_parts(model, self._config.modules)
        for module in self._modules:
            module.install()
        self._regions = {calls.region: calls for module in self._modules for calls in module.regions}

    def _find(self, regions: Mapping[str, str] | None) -> tuple[GraphedModule, ...]:
        if self._config.impl is CudaGraphImpl.none and self._config != CudaGraphConfig():
            warnings.warn("nothing is captured: CudaGraphConfig.impl is none; use impl='local'", UserWarning, 4)
        if self._config.policy is CapturePolicy.off or self._config.impl is CudaGraphImpl.none:
            return ()
        if regions and self._config.modules:
            raise ConfigError(modules_and_regions(regions))
        if regions:
            return graphed_modules(self._model, regions, self._make_calls)
        missing = in_no_layer(self._model, self._config.modules)
        found = graphed_layers(self._model, frozenset(self._config.modules), self._make_calls)
        if found and missing is not None:
            raise ConfigError(missing)
        if not found:
            found, self._eager_parts = found_layers(
                self._model, self._config.modules, self._make_calls, is_required=self.is_required
            )
        if not found:
            problem = nothing_to_capture(self._model, self._config.modules)
            if self.is_required:
                raise ConfigError(problem)
            warnings.warn(f"nothing is captured: {problem.what}. {problem.fix}", UserWarning, stacklevel=4)
        return found

    def _make_calls(self, region: Region, modules: Named) -> RegionCalls:
        return RegionCalls(region, modules, self, self.session.stats(region.name, region.kind))

    # ----- what the calls ask

    def before_call(self) -> bool:
        """With nothing in flight: capture what is due.

        Returns:
            True if :meth:`verify` is due as well: nothing is in flight, or many calls have come since the last time.

        Raises:
            StaleAddressError: a parameter or buffer has moved since the capture, or a module was replaced.
            CaptureError: see :meth:`end_step`.
        """
        observer = self.observer
        has_seen = observer is not None and (observer.plan.events or self.observed.without_gradient)
        if observer is not None and self._is_automatic and has_seen:
            # A forward whose result is kept without a backward may wait for ever: the update of the weights counts.
            is_quiet = not (self._num_open or observer.num_in_flight)
            if self._boundary.has_stepped() or (is_quiet and self._boundary.has_passed()):
                self._capture_observed()
        self._num_unchecked += 1
        if self._num_open and self._num_unchecked < _MAX_UNCHECKED:
            return False
        if self._watched is not None and self._is_built_later and self._build.poll() is not None and not self._num_open:
            self._is_built_later = False
            self.verify()  # The compiled part takes what it finds now for what was captured.
            self._use_fast_path()
        self._num_unchecked = 0
        return self._watched is not None

    def data_parallel_found(self) -> None:
        """From now on autograd accumulates gradients: what was captured without that is forgotten."""
        self.is_data_parallel = True
        self.observer = PlanObserver() if self.on_mismatch is MismatchPolicy.recapture else self.observer
        self.observed.forget()
        for calls in self._regions.values():
            self._chains.drop_all(calls, self._regions)

    def observed_call(self) -> PlanObserver | None:
        """The one who is told of a call that runs eagerly, if anybody is."""
        if self.observer is not None and not self.observer.plan.events:
            self._boundary.start()
        return self.observer

    def verify(self) -> None:
        """Refuse to go on if a parameter or buffer has moved or was replaced; in debug mode, if a tensor is gone."""
        if self._watched is None:
            return
        verify(self._watched, "before a replay", instead=ATTACH_AGAIN)
        pairs = {pair for calls in self._regions.values() for pair in calls.pairs()} if self.is_debugging else ()
        lost = [text for pair in pairs for text in pair.lost_tensors()]
        if lost:
            raise StaleAddressError(
                f"graphs read {'; '.join(lost)}, and it is gone",
                where="before a replay",
                fix="register it as a buffer of the module that reads it, and write new values into it",
            )

    def open_run(self, chain: Chain, index: int, *, is_verified: bool = False) -> ChainRun:
        """See :class:`graphstep.strategies.local_calls.Host`."""
        check = self.before_run(chain, index, is_verified=is_verified)
        self._num_open += 1
        return ChainRun(chain, index, self._run_closed, check)

    def _run_closed(self) -> None:
        self._num_open -= 1

    def before_run(self, chain: Chain, index: int, *, is_verified: bool = False) -> Callable[[GraphPair], None] | None:
        """Check the addresses of the chain if something else is in flight: :meth:`verify` was not due then.

        In debug mode, they are checked before backwards too.

        Returns:
            What is called before the backward, with the last pair that has run forward.
        """
        del index
        if self._num_open and not is_verified:
            self._verify_chain(chain)
        return (lambda _last: self.verify()) if self.is_debugging else None

    def _verify_chain(self, chain: Chain) -> None:
        watched = self._watched_of.get(chain)
        if watched is not None:
            verify(watched, "before a replay", instead=ATTACH_AGAIN)

    def _watch_chain(self, chain: Chain) -> Watched:
        return self.session.watch(
            [(pair.region.name, m) for pair in chain.pairs for m in pair.region.modules[:1]],
            may_be_frozen=True,
        )

    def not_replayed(self, calls: RegionCalls, reason: EagerReason) -> Callable[..., Any]:
        """It runs eagerly, and that is all."""
        del reason
        return calls.region.function

    # ----- capture

    def end_step(self) -> None:
        """Tell that a step is over: captures what was observed in it, if that can be captured now.

        Raises:
            CaptureError: with the policy ``required``, names the region that cannot be captured; with every policy, if
                captured modules replace tensors of the model. Everything runs eagerly as before, and nothing is tried
                again.
            StaleAddressError: a weight or buffer has moved since an earlier capture.
            LifecycleError: this object is closed.
        """
        self.session.require_open()
        self.session.settle_ahead()
        self._capture_observed()

    def _capture_observed(self) -> None:
        observer = self.observer
        self._boundary.clear()
        if observer is None:
            return
        if not observer.plan.trained():
            if observer.plan.events:
                self._boundary.start()  # Their backwards are still to come.
            # Unless nothing that they return has a gradient.
            self._note_no_gradient(self.observed.without_gradient)
            return
        self._check_attributes()
        handovers = dict(self.observed.handovers)
        self.observed.forget()
        # Inputs seen from now on are captured too where that is wanted; else nothing more is observed.
        self.observer = PlanObserver() if self.on_mismatch is MismatchPolicy.recapture else None
        # In the order of the step, so that all ranks of a job choose the same.
        seen = list(dict.fromkeys(variant for variant, _ in observer.plan.trained()))
        self._hits.update((variant.region, variant.signature) for variant in seen)
        if len(self._hits) > _MAX_COUNTED * max(1, len(self._regions)):
            # A loop whose signatures never come back: count anew, and let go of what is in them.
            now = {(variant.region, variant.signature) for variant in seen}
            self._hits = Counter({key: count for key, count in self._hits.items() if key in now})
        chosen = self._chains.worth_it(seen, self._hits, self._regions)
        plan = observer.plan.only(chosen)
        merge: int | None = self._config.merge_layers
        failures = CaptureFailures()
        while plan.calls:
            try:
                self._capture(plan, handovers, merge)
                break
            except RegionFailedError as error:
                if error.is_of_several:
                    merge = None  # Each by itself, to find out which one it is.
                    continue
                merge = self._config.merge_layers
                self._give_up(self._regions[error.region], error)
                failures.add(error.region.name, error)
                plan = plan.only({variant for variant, _ in plan.calls if variant.region is not error.region})
        failures.warn(stacklevel=3)
        self._note_no_gradient(self._regions)

    def _note_no_gradient(self, regions: Iterable[Region]) -> None:
        for calls in map(self._regions.__getitem__, regions):
            if (
                not calls.is_captured
                and calls.stats.eager_calls[EagerReason.OBSERVED]
                and calls.why_not is EagerReason.NOT_CAPTURED_YET
            ):
                calls.has_no_gradient()

    def _give_up(self, calls: RegionCalls, error: CaptureError) -> None:
        """Leave a region out, or stop: nothing is captured then, and nothing is tried again."""
        calls.stats.why_not_captured = cause(calls.region.name, error)
        if self.is_required:
            self.observer = None
            error.fix += OR_EAGERLY
            raise error
        calls.forget(EagerReason.CAPTURE_FAILED)

    def _capture(self, plan: Plan, handovers: Mapping[Key, Handover], merge: int | None) -> None:
        self.verify()  # What moved since an earlier capture must not be taken for what that one has seen.
        regions = {variant.region for variant, _ in plan.calls}
        attributes = {region: self._regions[region].note_attributes() for region in regions}
        before = {region: noted.again() for region, noted in attributes.items()}
        watched = self.session.watch([("", self._model)])
        chains: list[Chain] = []
        self.is_capturing = True
        try:
            with (
                torch.inference_mode(False),
                tensors_kept([watched], where=f"{self._config.impl.value}, after the capture"),
            ):
                chains = capture_chains(
                    Order(
                        plan=plan,
                        handovers=handovers,
                        session=self.session,
                        lanes=self._lanes,
                        receivers=self._regions,
                        attributes=attributes,
                        num_warmup_runs=self._config.warmup_steps,
                        merge=merge,
                        through_autograd=gradients_through_autograd(
                            self._model, list(self._regions), plan, is_data_parallel=self.is_data_parallel
                        ),
                        poisons=self._config.debug,
                        apart=self._apart,
                    )
                )
        except BaseException:
            if chains:  # They replace tensors of the model: nothing is tried again.
                self._release(chains)
                self.observer = None
            for region in regions:
                self._regions[region].captured()
            raise
        finally:
            self.is_capturing = False
        modules = [(path, module.module) for path, module in self._captured_modules()]
        self._watched = self.session.watch(modules, may_be_frozen=True)  # That is a matter of signatures.
        for chain in chains:
            self._watched_of[chain] = self._watch_chain(chain)
        note_shared_copies(chains)
        settle(chains, self.session)
        self._chains.add(chains, self._regions)
        for variant, _ in plan.calls:
            self._hits.pop((variant.region, variant.signature), None)
        for region in regions:
            self._regions[region].captured()
        for pair in (pair for chain in chains for pair in chain.pairs):
            as_before(pair.left, before[pair.region])
        self._use_fast_path()

    def _use_fast_path(self) -> None:
        """Hand the common case of all chains to the compiled part, if it is there by now."""
        fast = self._build.poll()
        if fast is None:
            return
        for module in self._modules:
            module.use(fast)
        chains = {chain for calls in self._regions.values() for chain, _ in calls.all_links()}
        for chain in chains:
            add_relay(fast, chain, self._regions)
        for calls in self._regions.values():
            add_starts(fast, calls, self._regions)
        for watched in (self._watched, *self._watched_of.values()):
            if watched is not None:
                watched.fast.speed_up(fast)

    def _check_attributes(self) -> None:
        """Have each region find the graphs that were captured with attributes as they are now."""
        for calls in self._regions.values():
            calls.look_at_attributes()

    def _captured_modules(self) -> list[tuple[str, GraphedModule]]:
        paths = {id(module): path for path, module in self._model.named_modules()}
        return [(paths.get(id(module.module), ""), module) for module in self._modules if module.regions]

    def _release(self, chains: list[Chain]) -> None:
        for chain in chains:
            for pair in chain.pairs:
                pair.release()
                pair.homes.forget()

    # ----- beside the graphs

    @property
    def model(self) -> nn.Module:
        """The whole model, as the loop calls it."""
        return self._model

    def eagerly(self) -> AbstractContextManager[None]:
        """In the body everything runs as it is, and nothing is observed or counted. Nothing may be in flight."""
        self.session.settle_ahead()
        return graphs_left_out(self._model.modules())

    def modules_in_parts(self) -> frozenset[nn.Module]:
        """Modules inside of captured layers that are run in parts: hooks that come before them would run again."""
        return frozenset(inner for module in self._modules for inner in module.in_parts)

    def reset_cuda_graph(self) -> None:
        """Drop all graphs; the next step is observed, and captured after it. Nothing may be in flight."""
        self.session.require_open()
        self.session.settle_ahead()
        for calls in self._regions.values():
            self._chains.drop_all(calls, self._regions)
            calls.forget(EagerReason.NOT_CAPTURED_YET)
        self.observer, self._watched = PlanObserver(), None
        self.observed.forget()
        self._hits.clear()
        self._boundary.clear()

    # ----- report and end

    def report(self) -> CaptureReport:
        """What has been captured so far, and how it was used."""
        report = replace(self.session.report(), eager_parts=self._eager_parts)
        for row in report.rows if report.num_recordings else ():
            if not (row.num_replays or row.is_captured or row.eager_calls or row.why_not_captured):
                row.why_not_captured = "never called (a module that torch.compile has compiled runs without its graphs)"
        return report

    def close(self) -> None:
        """Put the modules' own ``forward`` back and free the graphs. May be called twice."""
        self._put_back()
        self.session.close()

    def _put_back(self) -> None:
        for module in self._modules:
            for calls in module.regions:
                calls.forget(EagerReason.CLOSED)
            module.remove()
        self.observer = None
        self._boundary.clear()

    def __enter__(self) -> CudaGraphManager:
        self.session.require_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def attach(
    model: nn.Module, config: CudaGraphConfig | None = None, *, regions: Mapping[str, str] | None = None
) -> CudaGraphManager:
    """Capture the layers of a model, or chosen modules of it, as CUDA graphs; the training loop stays as it is.

    The graphs live as long as the model, or until the returned object is closed, at exit at the latest. See
    :class:`CudaGraphManager` for arguments and errors.
    """
    return CudaGraphManager(model, config, regions=regions)


def _device_of(model: nn.Module) -> torch.device:
    found = next(model.parameters(), None)
    return found.device if found is not None else torch.device("cpu")
