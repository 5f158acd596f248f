"""The commands of `outrider`, in the order of its help."""

from outrider_client.commands.base import Command, run_command
from outrider_client.commands.bench import BENCH
from outrider_client.commands.chat import CHAT
from outrider_client.commands.corpus import CORPUS
from outrider_client.commands.demo import DEMO
from outrider_client.commands.generate import GENERATE
from outrider_client.commands.head import HEAD
from outrider_client.commands.health import HEALTH
from outrider_client.commands.services import DRAFT, GATEWAY, MODEL, TARGET, TRAIN_HEAD, UP

COMMANDS: tuple[Command, ...] = (
    DEMO,
    UP,
    CHAT,
    GENERATE,
    BENCH,
    HEALTH,
    MODEL,
    HEAD,
    CORPUS,
    TARGET,
    DRAFT,
    GATEWAY,
    TRAIN_HEAD,
)

__all__ = ["COMMANDS", "Command", "run_command"]
