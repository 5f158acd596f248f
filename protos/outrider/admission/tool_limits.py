"""How many tools a request may bring, and how much text, as documented in target.proto."""

from __future__ import annotations

# As OpenAI.
MAX_TOOLS = 128
# Their JSON. Chosen: 2 KiB for each tool, several times what published ones have.
MAX_TOOLS_BYTES = 256 * 1024
