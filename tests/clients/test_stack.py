"""Services of one's own: found when healthy, explained when they fail, gone when the block is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from child_processes import living_children
from waits import HUNG_SECONDS

from outrider_client import DraftClient, ServiceUnreachable
from outrider_client.local.stack import ServiceFailed, Stack, private_directory


def test_private_directory_is_private_and_goes() -> None:
    with private_directory() as folder:
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


async def test_failure_to_start_shows_the_log(tmp_path: Path) -> None:
    async with Stack(tmp_path) as stack:
        with pytest.raises(ServiceFailed, match="the draft service exited with status 2") as raised:
            await stack.start("draft", "draft_service", "--drafter-of-dreams", "x")
    assert any("--drafter-of-dreams" in line for line in raised.value.tail)


async def test_service_lives_as_long_as_the_block(tmp_path: Path) -> None:
    async with Stack(tmp_path) as stack:
        address = await stack.start("draft", "draft_service", "--drafter", "prompt_lookup")
        async with DraftClient.connect(address) as draft:
            assert (await draft.info()).drafter == "prompt_lookup"
        (child,) = living_children(address)
    assert not child.is_running()


async def test_death_explains_a_lost_connection(tmp_path: Path) -> None:
    async with Stack(tmp_path) as stack:
        address = await stack.start("draft", "draft_service", "--drafter", "prompt_lookup")
        with pytest.raises(ServiceFailed, match="the draft service was killed by SIGKILL"):
            async with asyncio.timeout(HUNG_SECONDS), stack.explaining(), DraftClient.connect(address) as draft:
                (child,) = living_children(address)
                child.kill()
                while True:
                    await draft.info()
        with pytest.raises(ServiceUnreachable):
            async with Stack(tmp_path).explaining():
                raise ServiceUnreachable(address, "nobody died")
