"""Settings of the target service. Each default lives here, or with those of both services in `outrider.settings`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.busy_polling import BUSY_POLL_SECONDS, MOST_BUSY_POLL_SECONDS, usable_cores
from outrider.limits import TenantLimits
from outrider.named_heads import NamedSettings, head_in_process
from outrider.settings import ServiceSettings, comma_words, setting

# Equal to `tree_kernels.node_table.LOOKUP`, whose import would load torch.
MOST_LOOKED_UP = 15
# `outrider.tree.MAX_ROWS` without the root, whose import would load gRPC.
MOST_DRAFTED = 255
# `outrider.drafting.link.INPROCESS_SCHEME`, whose import would load gRPC.
_INPROCESS = "inprocess:"
# Most sequences of one step.
MAX_SEQUENCES = 1024


@dataclass(frozen=True)
class TargetConfig(ServiceSettings):
    """Everything `python -m target_service` takes, by flag, environment (`OUTRIDER_TARGET_*`) or `[target]` table."""

    model: str = setting("smollm2-135m-instruct", "model: a name from `outrider model list`, a folder, or a hub id")
    served_model_name: str = setting(
        "",
        "names that clients may ask for, with commas between; answers bear the first; the model's own when empty",
    )
    dtype: str = setting("bfloat16", "dtype of weights and KV cache", choices=("float32", "bfloat16", "float16"))
    device: str = setting("cpu", "torch device")
    tensor_parallel: int = setting(
        1,
        "processes that share the model, each with a part of every layer and, from `--device` on, a GPU of its own",
        ge=1,
        # More than any model has key heads for.
        le=64,
    )
    listen: str = setting("127.0.0.1:50051", "address to serve on: HOST:PORT or unix:PATH")

    draft: str = setting(
        "",
        "draft service: HOST:PORT, unix:PATH, several with commas between them, file:PATH for a file with one on each "
        "line that may change, inprocess:DRAFTER, or inpass:eagle or inpass:mtp for a head that runs behind each of "
        "the target's own passes on a GPU, with the drafter's flags behind its name; none when empty",
    )
    draft_token: str = setting("", "file with the token for the draft service; none when empty")
    draft_tls_ca: str = setting("", "PEM roots for the draft service's certificate; plain text when empty")
    draft_tls_certificate: str = setting("", "PEM certificate chain shown to the draft service", rare=True)
    draft_tls_key: str = setting("", "PEM private key of that certificate", rare=True)
    speculation: bool = setting(True, "use drafts; off verifies one-row trees through the same code")
    speculative_disable_queue_size: int = setting(
        MAX_SEQUENCES,
        "stop drafting while more than this many sequences run (on again at three quarters of it); by default it is "
        "used at any load where it pays",
        ge=0,
        rare=True,
    )
    allow_lossy: bool = setting(
        False,
        "let requests use typical acceptance, which is faster and does not keep the model's distribution; refused "
        "otherwise",
    )
    max_draft_nodes: int = setting(63, "drafted rows a sequence may have in one step", ge=0, le=MOST_DRAFTED)
    draft_wait_ms: float = setting(
        50.0,
        "bound of every wait for a draft",
        ge=0,
        deprecated="waits follow the measured times of steps and answers, within 50 ms",
    )
    draft_failures_to_open: int = setting(
        3, "late drafts in a row after which a sequence's draft is not waited for", ge=1, rare=True
    )
    draft_head: str = setting(
        "",
        "EAGLE head that the draft runs, whose projection is applied here: a name from `outrider head list`, a folder, "
        "or a hub id, the target's own for its MTP module; when empty, one that comes with Outrider is found once a "
        "draft asks for it, if steps run eagerly",
    )
    feature_window: int = setting(
        512, "hidden states of a sequence that are kept for a draft that connects late", ge=0, rare=True
    )
    lookup_tokens: int = setting(
        -1,
        "most tokens of each sequence that the device drafts from the text so far: up to 15, 0 for none, -1 for 15 on "
        "a GPU with captured steps and none elsewhere; 0 recycles no tokens either",
        ge=-1,
        le=MOST_LOOKED_UP,
    )
    row_budget: str = setting(
        "adaptive",
        "rows per tree: what pays by measured step cost and acceptance, or all",
        choices=("adaptive", "all"),
        rare=True,
    )

    page_size: int = setting(16, "tokens per KV page", choices=(1, 16, 64))
    kv_tokens: int = setting(
        0,
        "tokens the KV cache holds; 0 takes memory-share of a GPU, elsewhere 30 % of free memory, at most 65536",
        ge=0,
    )
    window_share: float = setting(
        0.5,
        "of the tokens in the KV cache, the share that layers with a sliding window have room for: each sequence needs "
        "its window there, and what a step reads; 1 keeps all",
        gt=0,
        le=1,
        rare=True,
    )
    prefix_cache: bool = setting(
        True,
        "share pages between sequences of a tenant that begin with the same text, and keep them when those end until "
        "their memory is needed",
    )
    # Chosen: half as many as sequences that run at once. Each takes as much memory as a sequence's own, 72 MiB at
    # Qwen3.5-9B's shape.
    kept_states: int = setting(
        32,
        "of models whose layers keep states in place of keys and values, how many states are kept beside shared pages, "
        "for sequences that begin with the same text; up to half follow sequences that generate, for what comes behind "
        "their answers; with 0 such models share no pages",
        ge=0,
        le=4096,
        rare=True,
    )
    kv_events: int = setting(
        0,
        "steps whose KV events are kept for routers that follow which pages are here (SubscribeKvEvents); 0 has none. "
        "Events hold tokens of all tenants: with tokens of callers only operators read them",
        ge=0,
    )
    openengine: bool = setting(
        False,
        "serve OpenEngine's gRPC services too (openengine.v1, experimental), as for Dynamo's sidecar; where callers "
        "need no token, each may then drain the target",
    )
    shared_prompts: str = setting(
        "",
        "file of JSON lines with what prompts of all tenants begin with, so that they share its pages: "
        '{"messages": [...]} or {"text": "..."}',
    )
    memory_share: float = setting(
        0.85, "share of the GPU memory free after capturing steps that the KV cache takes", gt=0, le=1
    )
    capture_seconds: float = setting(
        120.0, "time at start for capturing steps as CUDA graphs; 0 runs them eagerly", ge=0
    )
    # An H100's cold start took 90 s with twelve and 212 without (benchmarks/results/2026-11-28-h100-start.md).
    compile_processes: int = setting(
        -1,
        "processes that compile kernels at start, beside each other; 0: none, each kernel is compiled where it is "
        "first launched, -1: by the cores",
        ge=-1,
        le=64,
        rare=True,
    )
    max_context: int = setting(0, "longest sequence, prompt and output; 0 takes the model's own, at most 8192", ge=0)
    max_running: int = setting(64, "sequences that run at once", ge=1, le=MAX_SEQUENCES)
    max_waiting: int = setting(256, "sequences that wait; more are refused with RESOURCE_EXHAUSTED", ge=0)
    tenant_running: int = setting(
        0, "sequences of one tenant in one step; 0 is no bound, since tenants share by weight anyway", ge=0, rare=True
    )
    tenant_waiting: int = setting(
        0, "requests of one tenant without a token yet; 0 takes half of max-waiting", ge=0, rare=True
    )
    tenant_sequences: int = setting(512, "open sequences of one tenant; 0 is no bound", ge=0, rare=True)
    tenant_streams: int = setting(
        0, "calls of one tenant at once; 0 takes max-running and half of max-waiting together, and 16", ge=0, rare=True
    )
    tenant_kv_tokens: int = setting(
        0, "tokens of one tenant in the KV cache; 0 is no bound, since tenants share by weight anyway", ge=0, rare=True
    )
    tenant_requests_per_second: float = setting(
        500.0, "requests of one tenant on average; 0 is no bound", ge=0, rare=True
    )
    tenant_burst: int = setting(1000, "requests of one tenant that may come at once after a pause", ge=0, rare=True)
    tenant_texts: int = setting(16, "texts of one tenant that wait for the tokenizer; 0 is no bound", ge=0, rare=True)
    max_step_rows: int = setting(
        0, "rows of one forward pass, over all sequences; 0 takes 512, and 2048 on a GPU", ge=0
    )
    prefill_chunk: int = setting(
        0, "prompt tokens of one sequence in one step; 0 takes as many as a step has on a GPU, and half elsewhere", ge=0
    )
    prompt_wait_ms: float = setting(
        0,
        "longest step that reads prompts while others decode, whose tokens come no sooner; prompts are read in pieces "
        "that fit. Never less than two steps without prompts; 0 takes 24 on a GPU, up to 60 where few decode, and 200 "
        "elsewhere",
        ge=0,
        le=60_000,
    )

    attention: str = setting(
        "auto", "tree attention backend", choices=("auto", "reference", "torch", "triton", "flashinfer")
    )
    latent_cache: bool = setting(
        True,
        "where a model's attention has latents (DeepSeek-V2, -V3), cache one for each token; off caches keys and "
        "values of all heads, which takes many times the memory",
        rare=True,
    )
    lockstep: bool = setting(
        False,
        "on a GPU, run the plain loop that a CPU runs: one eager step after the other, verified by the host; slower, "
        "to hold the fast loop against",
        rare=True,
    )
    engine_process: str = setting(
        "auto",
        "the engine's process: its own, shared with the server, or auto: its own on a GPU",
        choices=("auto", "own", "shared"),
        rare=True,
    )
    draft_link_process: str = setting(
        "auto",
        "the process of the stream to a draft service: its own, shared with the engine, or auto: its own on a GPU",
        choices=("auto", "own", "shared"),
        rare=True,
    )
    draft_link_busy_poll_ms: float = setting(
        BUSY_POLL_SECONDS * 1e3,
        "with 8 cores or more, how long the process of a link to one draft polls for the next frame after each before "
        "it sleeps; a core is busy meanwhile",
        ge=0,
        le=MOST_BUSY_POLL_SECONDS * 1e3,
        rare=True,
    )
    batch_invariant: bool = setting(
        False, "on a GPU, make outputs the same to the bit whatever else runs; drafts are then chains, and steps slower"
    )
    threads: int = setting(
        0,
        "CPU threads for torch; 0 takes 1 beside a GPU and torch's own choice elsewhere",
        ge=0,
        # More than any machine has cores for.
        le=1024,
        rare=True,
    )
    max_sequences_per_stream: int = setting(256, "open sequences of one Verify stream", ge=1, rare=True)
    verify_idle_seconds: float = setting(
        120.0, "time a sequence of a Verify stream may go without a tree", gt=0, rare=True
    )
    drain_seconds: float = setting(30.0, "time running requests get after SIGTERM", ge=0)
    heartbeat_seconds: float = setting(30.0, "a step that takes longer makes health NOT_SERVING", gt=0)
    auth_tokens: str = setting(
        "",
        "file of `TOKEN TENANT` lines, with `operator` behind those that may update weights, and of `tenant NAME "
        "limit=number ...` lines; callers without a token are refused when set",
    )
    weights_folder: str = setting(
        "", "folder on this machine that operators may update the weights from; none when empty"
    )
    weights_staging: str = setting(
        "",
        "folder for streamed weights until they are read; the system's own for temporary files when empty",
        rare=True,
    )
    weights_stream_gb: float = setting(64.0, "most GB of one streamed update; 0 refuses streams", ge=0, rare=True)
    weights_without_token: bool = setting(
        False, "where no tokens are required, let every caller update the weights; otherwise none may"
    )
    log_requests: bool = setting(
        False, "log a line for each request that ends, at level info: tenant, tokens, times, drafted share, and no text"
    )
    trace_steps: bool = setting(False, "a child span per step in traced requests", rare=True)

    @property
    def served_names(self) -> tuple[str, ...]:
        """`served_model_name`, resolved: at least one name."""
        return tuple(dict.fromkeys(comma_words(self.served_model_name))) or (self.model,)

    def with_head_of_draft(self, named: NamedSettings) -> TargetConfig:
        """These settings with `draft_head`, if a drafter in this process has a head by name and the target has none."""
        if self.draft_head or not self.draft.startswith(_INPROCESS):
            return self
        return replace(self, draft_head=head_in_process(self.draft.removeprefix(_INPROCESS), named))

    @property
    def speculates(self) -> bool:
        """Whether a draft service is used at all."""
        return self.speculation and bool(self.draft)

    @property
    def drafts_in_passes(self) -> bool:
        """Whether the target's own passes draft."""
        # `outrider.drafting.link.IN_PASS_SCHEME`, likewise.
        return self.speculation and self.draft.startswith("inpass:")

    @property
    def drafting_resumes_at(self) -> int:
        """Running sequences at which drafting resumes after load has stopped it: fewer, so that it does not flap."""
        return max(1, int(self.speculative_disable_queue_size * 0.75))

    @property
    def tenant_limits(self) -> TenantLimits:
        """Limits of a tenant without any in the tokens' file. By default no tenant alone can fill the queue. Raises
        `SettingsError` for numbers that cannot work."""
        return TenantLimits(
            running=self.tenant_running,
            waiting=self.tenant_waiting or max(1, self.max_waiting // 2),
            sequences=self.tenant_sequences,
            streams=self.tenant_streams or self.max_running + self.max_waiting // 2 + 16,
            kv_tokens=self.tenant_kv_tokens,
            requests_per_second=self.tenant_requests_per_second,
            burst=self.tenant_burst,
            texts=self.tenant_texts,
        )

    @property
    def step_rows(self) -> int:
        """`max_step_rows`, 0 resolved: on a GPU, reading the weights takes the same time for few rows as for many."""
        return self.max_step_rows or (512 if self.device == "cpu" else 2048)

    @property
    def lookup_rows(self) -> int:
        """`lookup_tokens`, -1 resolved; none without speculation."""
        most = MOST_LOOKED_UP if self.lookup_tokens < 0 and self.captures else max(0, self.lookup_tokens)
        return most if self.speculation else 0

    @property
    def engine_apart(self) -> bool:
        """Whether the engine has its own process.

        On a GPU it needs one: steps take 1 to 2 ms, and the interpreter that launches them cannot also serve thousands
        of messages a second. On a CPU steps are long, and one process is simpler. The engine of a model with several
        ranks ends its process when a rank is lost.
        """
        return self.tensor_parallel > 1 or self._is_apart(self.engine_process)

    @property
    def link_apart(self) -> bool:
        """Whether the stream to a draft service has its own process."""
        return self._is_apart(self.draft_link_process)

    def _is_apart(self, process: str) -> bool:
        return process == "own" or (process == "auto" and self.device != "cpu")

    @property
    def captures(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        wanted = self.capture_seconds > 0 and not self.lockstep
        return self.device.startswith("cuda") and wanted and self.attention in ("auto", "triton")

    @property
    def compilers(self) -> int:
        """Processes that compile kernels at start, -1 resolved."""
        if not self.captures or self.compile_processes >= 0:
            return self.compile_processes if self.captures else 0
        # Processes that compile at start: as many as there are cores besides those of target and draft, and so many at
        # most, since each takes some 300 MB. Chosen.
        return max(0, min(12, int(usable_cores()) - 4))

    @property
    def prompt_waits(self) -> tuple[float, float]:
        """`prompt_wait_ms`, 0 resolved, in seconds; and that of few sequences."""
        if self.prompt_wait_ms:
            return self.prompt_wait_ms / 1e3, self.prompt_wait_ms / 1e3
        # Longest steps with prompts. On a GPU between vLLM's longest gaps of 64 streams at 8B size on an H100 (p99, 21
        # ms plain and 29 with a head): of the waits simulated by `benchmarks/host/simulated_prompts.py` 22 to 25 make
        # most tokens, and beside few streams those of 60 (`benchmarks/results/2026-11-29-cpu-first-tokens.md`). On two
        # cores a step of 24 ms would read no rows beside a decoding one of 34.
        return (0.2, 0.2) if self.device == "cpu" else (0.024, 0.06)

    @property
    def chunk_rows(self) -> int:
        """`prefill_chunk`, 0 resolved: on a GPU each step reads all weights, and a head may draft behind it."""
        return self.prefill_chunk or (self.step_rows // 2 if self.device == "cpu" else self.step_rows) or 1
