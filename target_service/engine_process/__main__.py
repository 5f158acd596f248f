"""`python -m target_service.engine_process FD`: runs the engine for the serving process at the other end of FD."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from outrider.runtime import collect_seldom, leave, switch_threads_often
from target_service.config import TargetConfig
from target_service.engine_process.server import Reporter, serve_engine
from target_service.preflight import check_head, check_model, prepared_draft

if TYPE_CHECKING:
    from target_service.assembly import Assembled


def build(config: TargetConfig, reporter: Reporter) -> Assembled:
    """Prepare the draft, then load the model and assemble its engine. Raises `EngineRefused`."""
    connect = prepared_draft(config)
    check_head(config.draft_head, config.model)
    check_model(config.model)
    # Imported late: PyTorch takes seconds, and wrong names should be refused at once.
    from target_service.assembly import assemble, load_model

    return assemble(config, load_model(config), reporter, connect)


if __name__ == "__main__":
    collect_seldom()
    switch_threads_often()
    leave(serve_engine(int(sys.argv[1]), build))
