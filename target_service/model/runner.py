"""One forward pass of a model over the paged KV cache."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, cast, get_args

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from target_service.config import MAX_SEQUENCES
from target_service.core.kv_cache import KVCache, WindowedLayers
from target_service.core.sequence import MAX_PASSES
from target_service.model.forward import Attention, ForwardInput, ForwardPass, WrittenRows, pass_over, spread
from target_service.model.head_projection import DraftHead
from target_service.model.hidden_state_hooks import LayerHooks
from target_service.model.network import TargetNetwork
from target_service.model.rank_link import LinkedStates, MoveAccepted, MoveRows, RankLink, RunPass
from target_service.text.tokenizer import ModelTokenizer
from tree_kernels.ahead import AheadCompiler
from tree_kernels.attention import AttentionBatch, Backend, TreeAttention
from tree_kernels.latent_attention import LatentAttention, LatentBackend
from tree_kernels.logit_shaping import SequenceTexts
from tree_kernels.node_table import NodeTable, StepIntegers, fill_pending
from tree_kernels.node_table.layout import LOOKUP
from tree_kernels.recurrence import RecurrenceBackend, RecurrentPass, RecurrentStates, TreeRecurrence
from tree_kernels.verification import DRAWN_BY_POSITION, RECORD, Verdicts, move_accepted, move_kv, records_of
from tree_models.in_pass import DraftingKind, InPassDrafter

# See `ModelRunner.run_device_rows`.
Begin = Callable[[StepIntegers, object | None], None]
# Those of the default settings: `max_running`, and `max_draft_nodes` with the root.
_STATE_SLOTS, _LARGEST_TREE = 64, 64


@dataclass(eq=False, repr=False)
class ModelRunner:
    """A model with its KV cache: rows in, logits out. Independent of sequences and trees."""

    network: TargetNetwork  # with its layers as they are prepared by now
    tokenizer: ModelTokenizer | None
    cache: KVCache
    attention: Attention
    name: str
    max_context: int
    end_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    link: RankLink | None = None  # to the other ranks, where several share the model

    def __post_init__(self) -> None:
        network = self.network
        self.vocabulary_size = network.vocabulary_size
        # Others never come, and must not be looked up.
        self.end_token_ids = tuple(token for token in self.end_token_ids if 0 <= token < self.vocabulary_size)
        self._last_position = network.longest_context - 1
        # [MAX_SEQUENCES] int32: tokens that are not on the host yet, written and read on the device.
        self.pending = torch.zeros(MAX_SEQUENCES, dtype=torch.int32, device=network.device)
        self.dtype = network.dtype
        self.device = network.device
        # Chooses the rows of passes on the device; see `enable_device_row_selection`.
        self.node_table: NodeTable | None = None
        # The hidden states that a drafter reads, and the part of its head that runs here.
        self.hooks: LayerHooks | None = None
        self.draft_head: DraftHead | None = None
        # Drafts behind each pass.
        self.in_pass: InPassDrafter | None = None
        # Compiles ahead what captured steps and what follows them launch, if anything does.
        self.ahead = AheadCompiler((), 0)
        self._recurrence: TreeRecurrence | None = None
        if self.cache.recurrent is not None:
            kind: RecurrenceBackend = "triton" if self.attention.backend == "triton" else "torch"
            self._recurrence = TreeRecurrence(kind, network.device)

    @property
    def latent(self) -> bool:
        """Whether the cache holds latents instead of keys and values."""
        return isinstance(self.attention, LatentAttention)

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return 1 if self.link is None else self.link.size

    @property
    def hidden_size(self) -> int:
        return self.network.hidden_size

    @property
    def captured_steps(self) -> tuple[int, int]:
        """How many sizes of steps run as captured graphs, and how many there were to capture; zeros where all steps
        are eager."""
        return 0, 0

    def pass_sizes(self, sequences: int) -> Sequence[int]:
        """Rows, rising, of the passes that a step of so many sequences runs as; none where it runs with its own."""
        del sequences
        return ()

    def attach(self, link: RankLink | None) -> None:
        """Run passes on all ranks of a link from now on."""
        self.link = link
        if link is not None and self.cache.recurrent is not None:
            self.cache.recurrent.mirror = LinkedStates(link)

    def compile_ahead(self, what: str, launches: Iterable[Callable[[], object]]) -> None:
        """Have `ahead` compile what `launches` would, see `AheadCompiler.compile`: on this rank alone, from whose cache
        the others take it."""
        with contextlib.nullcontext() if self.link is None else self.link.alone():
            self.ahead.compile(what, launches)

    def hook(self, layers: tuple[int, ...]) -> None:
        """Keep the outputs of these decoder layers only, from the next pass on; see `LayerHooks`. Raises `NotSupported`
        where the model has no such layers, or others were chosen before steps were captured."""
        if self.hooks is None or self.hooks.layers != layers:
            # Rows that hooks have room for until a pass has more.
            hooks = LayerHooks(self.network, layers, 64)
            if self.hooks is not None:
                self.hooks.remove()
            self.hooks = hooks

    def run_head(self, head: DraftHead | None) -> None:
        """Run this part of a draft's head from now on, on the model's device and in its dtype."""
        self.draft_head = head
        if head is not None and head.projection is not None:
            head.projection.to(device=self.device, dtype=self.dtype)

    def draft_in_passes(self, drafter: InPassDrafter) -> None:
        """Have a drafter run behind passes from now on, whose layers the cache has behind the model's."""
        self.in_pass = drafter
        self.hook(drafter.layers)

    def enable_device_row_selection(
        self,
        max_sequences: int,
        lookup_tokens: int = LOOKUP,
        backend: Literal["triton", "torch"] | None = None,
        *,
        recycles: bool = True,
    ) -> None:
        """Let the device choose rows from now on, for steps of up to `max_sequences`; `lookup_tokens` and `backend` are
        those of `NodeTable`, which `recycles` only where tokens are looked up."""
        self.node_table = NodeTable(
            self.cache.tokens,
            self.cache.page_size,
            self._last_position,
            max_sequences=max_sequences,
            max_passes=MAX_PASSES,
            lookup_tokens=lookup_tokens,
            recycles=recycles and lookup_tokens > 0,
            backend=backend,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> Tensor:
        """Logits [len(logit_rows), vocabulary], in the model's dtype. Writes the rows' keys and values."""
        token_ids = torch.tensor(batch.token_ids, device=self.device)
        return self.compute_logits(batch, token_ids, batch.logit_rows, self.recurrent_pass(batch))

    @torch.inference_mode()
    def run_pass(self, batch: ForwardInput, parameters: NDArray[numpy.int32]) -> ForwardPass:
        """Run the pass with the logits of its `output_rows` at their places, and copy `parameters` to the device.

        Does not wait for the device. The result may be overwritten by the next pass.
        """
        slots = self._to_device(batch.slots)
        token_ids = fill_pending(self._to_device(batch.token_ids), self.pending, slots, self.cache.tokens)
        recurrent = self.recurrent_pass(batch)
        count = len(batch.token_ids)
        # The device may have left rows free.
        rows = tuple(row for row in batch.output_rows if row < count)
        if len(rows) < count:
            places = torch.tensor(rows, dtype=torch.int64, device=self.device)
            logits = spread(self.compute_logits(batch, token_ids.long(), rows, recurrent), places, count)
        else:
            logits = self.compute_logits(batch, token_ids.long(), None, recurrent)
        on_device = torch.from_numpy(parameters).to(self.device)
        return self.pass_of_batch(batch, logits, token_ids, slots, on_device, recurrent)

    def pass_of_batch(
        self,
        batch: ForwardInput,
        logits: Tensor,
        token_ids: Tensor,
        slots: Tensor,
        parameters: Tensor,
        recurrent: RecurrentPass | None,
    ) -> ForwardPass:
        """An eager pass that ran, of these logits [R, V], and token ids and slots [R] int32."""
        parents = self._to_device(_parents_of(batch.attention))
        texts, nodes = self._texts(batch.attention), None if recurrent is None else recurrent.plan.node_slots
        done = ForwardPass(logits, token_ids, parents, slots, parameters, texts, node_slots=nodes)
        if self.in_pass is None:
            return done
        positions = self._to_device(batch.positions).clamp_(max=self._last_position)
        return replace(done, positions=positions, plan=self.attention.plan(batch.attention))

    def run_later(self, first: ForwardInput, passes: int, parameters: NDArray[numpy.int32]) -> ForwardPass:
        """Run `first.advanced_by(passes)` right after the pass before that one, which left the pending tokens.

        `parameters` are those of `first`; their positions move on with the passes.
        """
        moved = parameters.copy()
        records_of(moved, first.attention.sequences)["position"] += numpy.uint64(passes)
        return self.run_pass(first.advanced_by(passes), moved)

    def run_after(self, batch: ForwardInput, accepted_counts: Tensor, parameters: NDArray[numpy.int32]) -> ForwardPass:
        """Run `batch.shifted_by_accepted(accepted_counts)`, where those are [any] int32 of the step before, on the
        device.

        `parameters` are those of `batch`; their positions move on too. An eager runner waits for the counts.
        """
        counts, moved = accepted_counts.tolist(), parameters.copy()
        records = records_of(moved, batch.attention.sequences)
        for b, moves in batch.moves(counts):
            # The stream of a rejection's coins counts steps, not tokens.
            if records["mode"][b] in DRAWN_BY_POSITION:
                records["position"][b] += numpy.uint64(moves)
        return self.run_pass(batch.shifted_by_accepted(counts), moved)

    def run_device_rows(self, batch: ForwardInput, parameters: NDArray[numpy.int32], begin: Begin) -> ForwardPass:
        """Run a step whose drafted rows the device chooses.

        `batch` has the rows of sequences that the host lays out and then the roots of the others. Once it is laid out,
        `begin` is called with its integers, and with what keeps them at their addresses (None where they are new); it
        chooses the rows, see `NodeTable.choose_rows`. An eager runner waits for the rows and lays them out again.
        """
        table, attention = self.node_table, batch.attention
        assert table is not None, "tokens are kept by then"
        free = (0,) * (batch.room - len(batch.token_ids))
        on_device = torch.from_numpy(parameters).to(self.device)
        texts, parents = self._texts(attention), _parents_of(attention)
        step = StepIntegers(
            self._to_device(batch.token_ids + free),
            self._to_device(batch.positions + free),
            self._to_device(batch.slots + free),
            on_device,
            texts.query_starts,
            texts.prefix_lengths,
            texts.page_starts,
            texts.page_table,
            on_device[RECORD * table.max_sequences :],
            self._to_device(parents + [0] * (batch.room - len(parents))),
            self._to_device([int(tree is None) for tree in attention.parents]),
        )
        begin(step, None)
        return self._run_from_device(batch, step)

    def run_again(self, batch: ForwardInput, done: ForwardPass) -> ForwardPass:
        """Run the pass after `done`, which began as `batch` and moved on in device memory; see
        `NodeTable.report_and_choose_rows`."""
        assert done.step is not None, "a pass whose rows were drafted on the device"
        return self._run_from_device(batch, done.step)

    def empty_passes(self) -> Iterator[ForwardPass]:
        """A pass without sequences of each captured size, so that what follows such passes can be captured too. Before
        the first request."""
        return iter(())

    def capture_later(self) -> ForwardPass | None:
        """Capture one of the sizes that were left for later, while no step is under way: a pass of it without
        sequences, whose results are not used. None where no size is left."""
        return None

    def _run_from_device(self, batch: ForwardInput, step: StepIntegers) -> ForwardPass:
        """Run `batch` with the rows that the integers of `step` have by now."""
        starts, prefixes = tuple(step.query_starts.tolist()), tuple(step.prefix_lengths.tolist())
        by_row = step.token_ids, step.positions, step.slots
        token_ids, positions, slots = (tuple(each[: starts[-1]].tolist()) for each in by_row)
        parents, spans = step.parents.tolist(), zip(step.causal.tolist(), itertools.pairwise(starts), strict=False)
        trees = tuple(None if chain else tuple(parents[first:end]) for chain, (first, end) in spans)
        attention = replace(batch.attention, query_starts=starts, prefix_lengths=prefixes, parents=trees)
        laid_out = replace(batch, token_ids=token_ids, positions=positions, slots=slots, attention=attention)
        return replace(self.run_pass(laid_out, step.parameters.cpu().numpy()), step=step)

    def _texts(self, attention: AttentionBatch) -> SequenceTexts:
        """Where the texts of a pass's sequences lie, the tables on the device."""
        pages = attention.pages
        page_starts = accumulate(map(len, pages[:-1]), initial=0)
        return SequenceTexts(
            self.cache.tokens,
            self.cache.page_size,
            self._to_device(attention.query_starts),
            self._to_device(attention.prefix_lengths),
            self._to_device(list(page_starts)),
            self._to_device([page for held in pages for page in held]),
        )

    def _to_device(self, integers: Sequence[int]) -> Tensor:
        return torch.tensor(integers, dtype=torch.int32).to(self.device)

    def recurrent_pass(self, batch: ForwardInput) -> RecurrentPass | None:
        """The plan of layers with states, if there are some."""
        states = self.cache.recurrent
        if self._recurrence is None or states is None:
            return None
        slots = batch.state_slots or (0,) * batch.attention.sequences
        return RecurrentPass(self._recurrence, self._recurrence.plan(batch.attention, slots, states), states)

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values of every layer from slots to others, all of them read before any is written."""
        if self.link is not None:
            self.link.send(MoveRows(list(sources), list(targets)))
        lists = (self.cache.slots_of(torch.tensor(slots)) for slots in (sources, targets))
        for (keys, values), source, target in zip(self.cache.pools, *lists, strict=True):
            move_kv([*keys, *values], source, target)

    def prepare_moves(self, done: ForwardPass, verdicts: Verdicts, drafting: DraftingKind | None = None) -> None:
        """Have the other ranks move what this pass wrote of accepted rows, and run their part of the drafter. Before
        each `share_verdicts`, and outside of graphs."""
        if self.link is not None:
            counts = len(verdicts.accepted_counts), len(verdicts.tensor)
            self.link.send(MoveAccepted(*counts, parameters=len(done.parameters), drafting=drafting))
            self.link.share(done.parameters)

    def share_verdicts(self, verdicts: Verdicts) -> None:
        """Share a pass's verdicts with the other ranks. Before each `move_accepted`; can be captured."""
        if self.link is not None:
            self.link.share(verdicts.tensor)

    def move_accepted(
        self, written: WrittenRows, verdicts: Verdicts, backend: Literal["triton", "torch"] | None = None
    ) -> None:
        """Move what a pass wrote of accepted rows behind their roots, in every layer; see
        `tree_kernels.verification.move_accepted`. Can be captured."""
        accepted, recurrent = (written.parameters, verdicts, backend), self.cache.recurrent
        for (keys, values), slots in zip(self.cache.pools, self.cache.slots_of(written.slots), strict=True):
            move_accepted(keys, values, slots, *accepted)
        if recurrent is not None and written.node_slots is not None:
            move_accepted(recurrent.inputs, recurrent.gates, written.node_slots, *accepted)

    def compute_logits(
        self, batch: ForwardInput, token_ids: Tensor, rows: Sequence[int] | None, recurrent: RecurrentPass | None
    ) -> Tensor:
        """Logits of the given rows, None for all, of a pass whose tokens are `token_ids` [R] int64. `recurrent` plans
        the layers with states, if there are some."""
        if self.link is not None:
            self.link.send(RunPass.of(batch, rows))
            self.link.share(token_ids)
        # Of a chunk within a prompt there are none.
        outputs = 0 if rows is None else torch.tensor(rows, dtype=torch.int64, device=self.device)
        slots, positions = (torch.tensor(each, device=self.device) for each in (batch.slots, batch.positions))
        if self.cache.frames is not None:
            self.cache.frames.send()
        plan = self.attention.plan(batch.attention)
        step = pass_over(self.attention, plan, slots, self.cache, recurrent)
        # A tree may reach past the end of position tables; no such row can be committed.
        return self.network(token_ids, positions.clamp_(max=self._last_position), step, outputs)


def _parents_of(attention: AttentionBatch) -> list[int]:
    """The parent of each row, relative to its sequence's first; 0 in chains."""
    trees = zip(attention.parents, attention.row_counts, strict=True)
    return [parent for tree, rows in trees for parent in tree or (0,) * rows]


def end_tokens_of(config: PretrainedConfig, generation: Any | None) -> tuple[int, ...]:
    """The ids that end a sequence, from the generation config or else the model's config."""
    ends = getattr(generation, "eos_token_id", None)
    ends = config.eos_token_id if ends is None else ends
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, (list, tuple)) else (int(ends),)


def runner_over(
    network: TargetNetwork,
    tokenizer: ModelTokenizer | None,
    *,
    num_pages: int,
    page_size: int,
    end_token_ids: tuple[int, ...],
    attention: Backend = "torch",
    invariant: bool = False,
    name: str = "model",
    max_context: int | None = None,
    tokenizer_fingerprint: str = "",
    state_slots: int = _STATE_SLOTS,
    kept_states: int = 32,
    largest_tree: int = _LARGEST_TREE,
    window_share: float | None = 1.0,
    window_rows: int = 0,
    in_pass: InPassDrafter | None = None,
) -> ModelRunner:
    """A runner for a network, on its device and in its dtype, behind whose passes `in_pass` drafts. Where layers keep
    states, `state_slots` sequences have one at a time, `kept_states` are kept behind prefixes, and `largest_tree` is
    the most rows of a sequence that may be dropped. Layers with a window have room for `window_share` of what the
    others keep, and at least for one window and `window_rows`; None keeps all, without frames."""
    recurrent, of_network = None, (network.dtype, network.device)
    if network.recurrent_layers is not None:
        count, shape = network.recurrent_layers
        recurrent = RecurrentStates(count, state_slots, largest_tree, shape, *of_network, kept_states, page_size)
    windows, windowed = {layer: window for layer, window in enumerate(network.windows) if window is not None}, None
    if windows and window_share is not None:
        longest_window = max(*windows.values(), in_pass.window if in_pass is not None else 0)
        windowed = WindowedLayers(tuple(windows), longest_window, window_share, window_rows)
    shapes = [*network.cache_shapes, *(in_pass.cache_shapes if in_pass is not None else ())]
    cache = KVCache(num_pages, page_size, shapes, *of_network, recurrent, windowed)
    over_cache: Attention
    if network.latent:
        over_cache = LatentAttention(cast(LatentBackend, attention), network.device)
    else:
        over_cache = TreeAttention(attention, network.device, invariant=invariant)
    longest = max_context or network.longest_context
    runner = ModelRunner(network, tokenizer, cache, over_cache, name, longest, end_token_ids, tokenizer_fingerprint)
    if in_pass is not None:
        runner.draft_in_passes(in_pass)
    return runner


def takes_latents(attention: Backend) -> bool:
    """Whether an attention backend supports latents."""
    return attention in get_args(LatentBackend)
