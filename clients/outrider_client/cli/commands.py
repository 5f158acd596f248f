"""The commands of `outrider`, in the order of its help."""

from outrider_client.cli.bench import BENCH
from outrider_client.cli.chat import CHAT
from outrider_client.cli.corpus import CORPUS
from outrider_client.cli.demo import DEMO
from outrider_client.cli.generate import GENERATE
from outrider_client.cli.head import HEAD
from outrider_client.cli.health import HEALTH
from outrider_client.cli.info import INFO
from outrider_client.cli.services import DRAFT, GATEWAY, MODEL, TARGET, TRAIN_HEAD, UP
from outrider_client.cli.tune import TUNE
from outrider_client.cli.weights import WEIGHTS

COMMANDS = (
    *(DEMO, UP, CHAT, GENERATE, BENCH, TUNE, HEALTH, INFO),
    *(MODEL, HEAD, CORPUS, WEIGHTS, TARGET, DRAFT, GATEWAY, TRAIN_HEAD),
)
