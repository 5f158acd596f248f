"""What can go wrong, and how a program handles it. Run a target first: `outrider up`."""

import sys

from outrider.errors import DeadlineExceeded, InvalidField, OutriderError
from outrider_client import Policy, ServiceUnreachable, SyncClient

# Nothing listens at the second address, and no model has the name in the last request.
REQUESTS = (
    ("127.0.0.1:50051", {"text": "Once upon a time", "timeout": 60.0}),
    ("127.0.0.1:1", {"text": "Once upon a time"}),
    ("127.0.0.1:50051", {}),
    ("127.0.0.1:50051", {"messages": [{"role": "user", "content": None}]}),
    ("127.0.0.1:50051", {"text": "Once upon a time", "model": "no such model"}),
)

for address, request in REQUESTS:
    # A full queue returns a time to retry after; this gives up after the second refusal.
    with SyncClient.connect(address, policy=Policy(attempts=2)) as client:
        try:
            result = client.generate(**request).result()
            sys.stdout.write(f"answered with {result.completion_tokens} tokens\n")
        except TypeError as error:
            sys.stdout.write(f"not a request: {error}\n")
        except InvalidField as error:
            sys.stdout.write(f"at fault: {error.field}\n")
        except DeadlineExceeded:
            sys.stdout.write("took too long\n")
        except ServiceUnreachable as error:
            sys.stdout.write(f"{error}\n")
        except OutriderError as error:
            sys.stdout.write(f"refused: {error.reason}\n")
