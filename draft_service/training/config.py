"""Settings of `outrider train-head`: the only place of their defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.settings import Settings, SettingsError, setting


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """What `python -m draft_service.training` takes: flags, environment (`OUTRIDER_TRAINING_*`) or `[training]`."""

    model: str = setting("smollm2-135m-instruct", "target to learn from: a name the target knows, a folder, a hub id")
    out: str = setting("", "folder for the head; what a run needs to go on lies beside it, in FOLDER.run")
    device: str = setting(
        "cpu", "torch device of target and head; several, such as cuda:0,cuda:1, write and train together"
    )
    dtype: str = setting("bfloat16", "type they compute in; the head's weights are kept in fp32 beside it")
    teacher: str = setting("local", "an entry point of outrider.teachers, or MODULE:FUNCTION")
    minutes: float = setting(
        0.0, "wall time of the whole run, to which writing and schedule adapt; 0 is unbounded", ge=0
    )
    seed: int = setting(0, "seed of all random numbers")
    resume: bool = setting(False, "go on with the run in FOLDER.run")

    kind: str = setting(
        "eagle3", "what is trained: an EAGLE-3 head, or --steps Medusa heads", choices=("eagle3", "medusa")
    )
    init: str = setting(
        "", "head to start from, a name or folder, with its shape and token map; only --layers may add to them"
    )
    new_vocabulary: bool = setting(
        False, "with --init: choose the --vocabulary tokens by the text again, in place of those of the head"
    )
    text: str = setting("", "folder of existing text, `text` of another run, to train on; none is written then")
    tokens: str = setting("20M", "tokens of text to write: a number, with k or M")
    writing_share: float = setting(
        0.5, "share of --minutes after which writing ends, even if there is less text", gt=0, le=1
    )
    writers: int = setting(1, "processes that write at once, one a device at least; more than one pays on a GPU", ge=1)
    sequences: int = setting(0, "texts that each writes at once; 0 is 256 on a GPU and 16 elsewhere", ge=0)
    prompts: str = setting("", "file of prompts to answer first: JSON lines with `turns`, or a prompt a line")
    sampled_prompts: bool = setting(True, "let the target make up prompts, by itself or after those of the file")
    temperatures: str = setting("0,0.7,1", "temperatures of answers, in turn; 0 must be one, to validate with")
    max_length: int = setting(1024, "tokens of a prompt and its answer", ge=16)
    max_prompt: int = setting(192, "tokens of a prompt that the target makes up; longer ones are dropped", ge=1)
    max_answer: int = setting(512, "tokens of an answer; small models repeat themselves without end", ge=1)
    turns: int = setting(2, "questions of a conversation that the target makes up, at most", ge=1)

    style: str = setting("eagle3.1", "architecture of an EAGLE-3 head", choices=("eagle3", "eagle3.1"))
    layers: int = setting(1, "layers of the head, or residual blocks of each Medusa head", ge=1)
    hidden: int = setting(0, "width of the head; 0 takes the target's, another carries its own token embedding", ge=0)
    intermediate: int = setting(0, "width of the head's MLP; 0 takes the target's, or 8/3 of --hidden", ge=0)
    tied: bool = setting(False, "take logits from the target's own lm_head, which is neither trained nor saved")
    vocabulary: int = setting(16384, "tokens that the head can draft, the most frequent ones; 0 is all of them", ge=0)

    steps: int = setting(
        5, "steps of training-time test, the depth of drafts that the head learns; of Medusa heads their number", ge=1
    )
    decay: float = setting(0.8, "weight of each step's loss relative to the one before", gt=0)
    epochs: float = setting(6.0, "passes over the text at most", gt=0)
    batch_tokens: int = setting(16384, "tokens of a batch, with padding", ge=1)
    learning_rate: float = setting(1e-3, "AdamW's, at its highest", gt=0)
    warmup: float = setting(0.04, "share of training until then", ge=0, le=1)
    weight_decay: float = setting(0.01, "AdamW's, of matrices", ge=0)
    clip: float = setting(1.0, "largest norm of a gradient", gt=0)
    compile: bool = setting(False, "compile the training step; costs a minute for every length of texts")

    validation: int = setting(48, "greedy texts that are held back to validate with", ge=1)
    validation_seconds: float = setting(
        30.0, "time between validations, each of which saves the head and the run", ge=0
    )
    log_level: str = setting("info", "log level", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out:
            raise SettingsError("--out must name the folder for the head")
        if self.batch_tokens < self.max_length:
            raise SettingsError("--batch-tokens must hold at least one text of --max-length")
        if not 0 < self.writing_share < 1:
            raise SettingsError("--writing-share lies between 0 and 1")
        if self.tied and self.hidden:
            raise SettingsError("--tied needs a head of the target's width: leave out --hidden")
        if self.kind == "medusa" and (self.hidden or self.intermediate or self.tied or self.new_vocabulary):
            raise SettingsError(
                "--kind medusa has the target's width and lm_heads of its own: leave out --hidden, --intermediate, "
                "--tied and --new-vocabulary"
            )
        if self.new_vocabulary and not self.init:
            raise SettingsError("--new-vocabulary needs --init")
        if self.text and not Path(self.text).is_dir():
            raise SettingsError(f"--text {self.text} is no folder")
        if not (self.prompts or self.sampled_prompts):
            raise SettingsError("without sampled prompts there must be a file of --prompts")
        if 0.0 not in self.temperature_list or min(self.temperature_list) < 0:
            raise SettingsError("--temperatures needs 0, which validation takes its texts from, and none below")
        if self.token_goal < 1:
            raise SettingsError("--tokens must be at least 1")
        if "" in self.devices or len({device.partition(":")[0] for device in self.devices}) > 1:
            raise SettingsError(f"--device {self.device}: needs devices of one kind, such as cuda:0,cuda:1")
        gpus = [device for device in self.devices if device != "cpu"]
        if len(gpus) > 1 and ("cuda" in gpus or len(set(gpus)) < len(gpus)):
            raise SettingsError(f"--device {self.device}: name each GPU once, by its number")

    @property
    def token_goal(self) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", self.tokens.strip().replace("_", ""))
        if match is None:
            raise SettingsError(f"--tokens: {self.tokens!r} is not an amount such as 500k or 20M")
        return round(float(match[1]) * {"": 1, "k": 1_000, "M": 1_000_000}[match[2]])

    @property
    def temperature_list(self) -> tuple[float, ...]:
        try:
            return tuple(float(word) for word in self.temperatures.split(","))
        except ValueError:
            raise SettingsError(f"--temperatures: {self.temperatures!r} is no list of numbers") from None

    @property
    def devices(self) -> tuple[str, ...]:
        """`device` as a list; the first one leads."""
        return tuple(word.strip() for word in self.device.split(","))

    @property
    def writers_at_once(self) -> int:
        """`writers`, but at least one for each device."""
        return max(self.writers, len(self.devices))

    @property
    def sequences_at_once(self) -> int:
        """`sequences`, or the default for the device."""
        return self.sequences or (256 if self.device.startswith("cuda") else 16)

    @property
    def out_folder(self) -> Path:
        return Path(self.out)

    @property
    def run_folder(self) -> Path:
        """Folder of the run's text, checkpoint and settings."""
        return self.out_folder.with_name(self.out_folder.name + ".run")
