"""Settings of the command line's client side, each with its only default."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from outrider.sampling import MAX_SEED, SamplingParams, TypicalAcceptance, VerificationMode
from outrider.settings import DRAFTERS, Settings, SettingsError, comma_words, read_text, setting
from outrider_client.connection import Connection, Tls
from outrider_client.generation import Speculation
from outrider_client.local.models import DEFAULT_MODEL

_TYPICAL = TypicalAcceptance()
_DRAFTERS = f"{', '.join(DRAFTERS)}, or MODULE:CLASS of your own"


@dataclass(frozen=True)
class AccessOptions(Settings):
    """Credentials and deadline for a service, by flag, environment (`OUTRIDER_CLIENT_*`) or `[client]` table."""

    token: str = setting("", "bearer token sent with every call", secret=True)
    token_file: str = setting("", "file with the token; or OUTRIDER_CLIENT_TOKEN holds it")
    tenant: str = setting("", "tenant to act for; the service's default when empty")
    tls: bool = setting(False, "use TLS")
    tls_ca: str = setting("", "PEM roots to check the service with; implies TLS")
    tls_certificate: str = setting("", "PEM client certificate; implies TLS")
    tls_key: str = setting("", "PEM key of the client certificate")
    timeout: float = setting(
        0.0, "seconds until a call is given up; 0: never for an answer, 10 s for other calls", ge=0
    )

    @property
    def deadline(self) -> float | None:
        return self.timeout or None

    def secret(self) -> str:
        """The token, if there is one. Raises `SettingsError` for a file that cannot be read."""
        if self.token or not self.token_file:
            return self.token
        return read_text(self.token_file).strip()

    def tls_options(self) -> Tls | None:
        """`tls` of `Client.connect`. Raises `SettingsError` for missing files."""
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise SettingsError("a client certificate needs its key, and a key its certificate")
        if not (self.tls or self.tls_ca or self.tls_certificate):
            return None
        for path in filter(None, (self.tls_ca, self.tls_certificate, self.tls_key)):
            if not Path(path).is_file():
                raise SettingsError(f"{path}: no such file")
        return Tls(*(Path(path) if path else None for path in (self.tls_ca, self.tls_certificate, self.tls_key)))

    def connection(self, address: str, server_name: str = "") -> Connection:
        """A connection to a service, whose certificate is for `server_name` where that is not in the address. Raises
        `SettingsError` for an invalid address."""
        tls, token = self.tls_options(), self.secret()
        try:
            return Connection(address, tls=tls, token=token, tenant=self.tenant, server_name=server_name)
        except ValueError as error:
            raise SettingsError(str(error)) from None


@dataclass(frozen=True)
class ClientOptions(AccessOptions):
    """`AccessOptions`, and where the target is. The section and the environment are the same."""

    target: str = setting("127.0.0.1:50051", "target service: HOST:PORT or unix:PATH")


@dataclass(frozen=True)
class GenerateOptions(Settings):
    """How to generate, by flag, environment (`OUTRIDER_GENERATE_*`) or `[generate]` table."""

    max_tokens: int = setting(256, "tokens at most", ge=1)
    temperature: float = setting(0.0, "0 is greedy")
    top_k: int = setting(0, "keep the k most probable tokens; 0 keeps all")
    top_p: float = setting(1.0, "keep the smallest set of tokens with this much probability")
    min_p: float = setting(0.0, "drop tokens less probable than this times the most probable one")
    repetition_penalty: float = setting(1.0, "above 1 makes tokens seen in prompt or output less likely")
    presence_penalty: float = setting(0.0, "subtracted once from tokens seen in the output")
    frequency_penalty: float = setting(0.0, "subtracted from tokens once per occurrence in the output")
    min_tokens: int = setting(0, "tokens before the output may end")
    ignore_eos: bool = setting(False, "go on past the model's end tokens")
    seed: int | None = setting(None, "seed of sampling; drawn by the target when none", le=MAX_SEED)
    speculation: bool = setting(
        True, "let the target use drafts; the output is the same either way, but for mode typical"
    )
    mode: str = setting(
        "auto",
        "how drafts are verified; typical is not lossless, and has to be allowed by the target's --allow-lossy",
        choices=("auto", *(mode.value for mode in VerificationMode)),
    )
    typical_epsilon: float = setting(
        _TYPICAL.epsilon, "with typical: a drafted token above this probability is kept; below 1", gt=0, le=1
    )
    typical_delta: float = setting(
        _TYPICAL.delta,
        "with typical: so is one above this times exp(-entropy) of the model's distribution; below 1",
        gt=0,
        le=1,
    )
    max_nodes: int | None = setting(None, "drafted rows per step at most; the target's own limit when none", ge=0)
    corpus: str = setting("", "shared corpus the draft may use")

    def sampling(self, stop: tuple[str, ...] = ()) -> SamplingParams:
        """The settings that have the names of sampling parameters."""
        own = vars(self)
        named = {field.name: own[field.name] for field in fields(SamplingParams) if field.name in own}
        return SamplingParams(**named, stop=stop)

    def speculating(self, enabled: bool | None = None) -> Speculation:
        """The options of one request; `enabled` overrides the setting."""
        wanted = self.speculation if enabled is None else enabled
        mode = None if self.mode == "auto" else VerificationMode(self.mode)
        typical = mode is VerificationMode.TYPICAL
        return Speculation(
            # Left to the target rather than True: a target without a draft then decodes plainly.
            enabled=None if wanted else False,
            mode=mode,
            max_nodes=self.max_nodes,
            corpus=self.corpus,
            typical=TypicalAcceptance(self.typical_epsilon, self.typical_delta) if typical else None,
            # For the colours of drafted text.
            token_texts=True,
        )


@dataclass(frozen=True)
class UpOptions(Settings):
    """What `outrider up` runs, by flag, environment (`OUTRIDER_UP_*`) or `[up]` table."""

    host: str = setting("127.0.0.1", "address the target listens on")
    port: int = setting(50051, "port the target listens on", ge=1, le=65535)
    model: str = setting("", "model to serve; the target's own setting when empty")
    dtype: str = setting("", "dtype of the model; the target's own setting when empty")
    drafter: str = setting(
        "", f"drafter: {_DRAFTERS}; the draft's own setting when empty, and no draft service at all for none"
    )
    http: str = setting("", "also serve an OpenAI-compatible API and a chat page on this port, or HOST:PORT")
    draft_listen: str = setting(
        "",
        "address the draft listens on; when empty a private socket, or none for a draft that runs a network on the "
        "target's GPU, which is in the target's process then",
    )
    target_flags: str = setting("", "more flags for the target, quoted as one word")
    draft_flags: str = setting("", "more flags for the draft, quoted as one word")
    gateway_flags: str = setting("", "more flags for the gateway, quoted as one word")


@dataclass(frozen=True)
class DemoOptions(Settings):
    """What `outrider demo` shows, by flag, environment (`OUTRIDER_DEMO_*`) or `[demo]` table."""

    model: str = setting(DEFAULT_MODEL, "model: a name from `outrider model list`, a folder, or a hub id")
    max_tokens: int = setting(200, "tokens of the answer at most", ge=1)


@dataclass(frozen=True)
class BenchOptions(Settings):
    """What `outrider bench` measures, by flag, environment (`OUTRIDER_BENCH_*`) or `[bench]` table."""

    prompts: str = setting("", "JSONL file, one prompt a line: id, task, turns")
    limit: int = setting(0, "prompts in all, taken evenly from the tasks; 0 takes every one", ge=0)
    tasks: str = setting("", "tasks to keep, with commas between; all when empty")
    modes: str = setting("plain,trie", "plain, transformers, or drafters, with commas between")
    concurrency: str = setting("1", "requests at once, with commas between")
    draft_placement: str = setting("remote", "where drafters run: remote, inprocess, or both with a comma between")
    repeats: int = setting(1, "times the whole is measured", ge=1)
    max_tokens: int = setting(200, "tokens of an answer at most", ge=1)
    second_turns: bool = setting(True, "send second turns too, with the first answer in the conversation")
    isolate: bool = setting(
        False, "forget between prompts what drafts learnt, so that each drafts from its own prompt and output only"
    )
    target: str = setting("", "running target to use; one is started for every drafter when empty")
    model: str = setting(DEFAULT_MODEL, "model to serve, and to compare with transformers")
    dtype: str = setting("bfloat16", "dtype of the model", choices=("float32", "bfloat16", "float16"))
    device: str = setting("cpu", "torch device")
    target_flags: str = setting("", "more flags for the targets, quoted as one word")
    draft_flags: str = setting("", "more flags for the drafts, quoted as one word")
    json: str = setting("", "file for the figures")
    plot: str = setting("", "PNG file for the plot")
    profile: bool = setting(False, "show where a target's time goes in each step, from its metrics")


@dataclass(frozen=True)
class TuneOptions(Settings):
    """What `outrider tune` tries, by flag, environment (`OUTRIDER_TUNE_*`) or `[tune]` table."""

    model: str = setting("", "model to serve; the target's own setting when empty")
    dtype: str = setting("", "dtype of the model; the target's own setting when empty")
    device: str = setting("", "torch device of the target; placed as `outrider up` does when empty")
    drafter: str = setting("trie", f"drafter to tune: {_DRAFTERS}")
    candidates: str = setting(
        "",
        "settings to try instead of those known for the drafter: SECTION.NAME=NUMBER, with spaces between those of one "
        "candidate and semicolons between candidates",
    )
    minutes: float = setting(5.0, "time for the whole, services' start included", gt=0)
    concurrency: str = setting("1", "requests at once, with commas between; a candidate is judged by all of them")
    prompts: str = setting("", "JSONL file, one prompt a line: id, task, turns; a dozen that come along when empty")
    # Chosen, not measured: long enough for a text to repeat itself, short enough for many pairs in a minute.
    max_tokens: int = setting(48, "tokens of an answer at most", ge=1)
    target_flags: str = setting("", "more flags for the targets, quoted as one word")
    draft_flags: str = setting("", "more flags for the drafts, quoted as one word")
    out: str = setting("", "TOML file to write, for --config of the services and of `outrider up`")
    plot: str = setting("", "PNG file for the plot")


def request_counts(text: str) -> list[int]:
    """The numbers of concurrent requests that --concurrency lists. Raises `SettingsError`."""
    words = comma_words(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise SettingsError(f"--concurrency: {text!r} is not a list of whole numbers above 0")
    return list(map(int, words))


def flag_words(flags: str) -> list[str]:
    """Flags that were quoted as one word, split as a shell does. Raises `SettingsError`."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise SettingsError(f"{flags!r}: {error}") from None
