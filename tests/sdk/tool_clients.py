"""Programs that call a tool with clients that others wrote, whole and streamed. Each prints the arguments as JSON."""

from __future__ import annotations

_LANGCHAIN = """
import json
from typing import Literal
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

class Add(BaseModel):
    "Add a number."
    model_config = ConfigDict(extra="forbid")
    kind: Literal["whole", "real"]

model = ChatOpenAI(model="NAME", base_url="http://127.0.0.1:8000/v1", api_key="unused", max_tokens=400, seed=3)
"""
_RESPONSES = """
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused")
add = {"type": "function", "name": "Add", "strict": True, "parameters": {
    "type": "object", "properties": {"kind": {"enum": ["whole", "real"]}}, "required": ["kind"],
    "additionalProperties": False}}
asked = dict(
    model="NAME", input="hi", max_output_tokens=400, tools=[add, {**add, "name": "Other"}], parallel_tool_calls=False,
    tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "Add"}]})
"""
_LITELLM = """
import litellm

litellm.suppress_debug_info = True

tool = {"type": "function", "function": {"name": "Add", "parameters": {
    "type": "object", "properties": {"kind": {"enum": ["whole", "real"]}}, "required": ["kind"],
    "additionalProperties": False}}}
asked = dict(
    model="openai/NAME", api_base="http://127.0.0.1:8000/v1", api_key="unused", max_tokens=400,
    messages=[{"role": "user", "content": "hi"}], tools=[tool],
    tool_choice={"type": "function", "function": {"name": "Add"}})
"""
_AGENT = """
from typing import Literal
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

class Add(BaseModel):
    kind: Literal["whole", "real"]

model = OpenAIChatModel("NAME", provider=OpenAIProvider(base_url="http://127.0.0.1:8000/v1", api_key="unused"))
agent = Agent(model, output_type=Add, model_settings={"max_tokens": 400, "parallel_tool_calls": False})
print(agent.run_sync("hi").output.model_dump_json())
"""
_VERCEL = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const outrider = createOpenAICompatible({ name: "outrider", baseURL: "http://127.0.0.1:8000/v1", apiKey: "unused" });
const Add = tool({ inputSchema: jsonSchema({
  type: "object", properties: { kind: { enum: ["whole", "real"] } }, required: ["kind"], additionalProperties: false,
}) });
const asked = {
  model: outrider("NAME"), prompt: "hi", maxOutputTokens: 400, tools: { Add },
  toolChoice: { type: "tool", toolName: "Add" },
};
"""
PROGRAMS = {
    "langchain": _LANGCHAIN
    + """
print(model.with_structured_output(Add, method="function_calling").invoke("hi").model_dump_json())
pieces = model.bind_tools([Add], tool_choice="any", parallel_tool_calls=False).stream("hi")
whole = next(pieces)
for piece in pieces:
    whole += piece
print(json.dumps(whole.tool_calls[0]["args"]))
""",
    "langchain, responses": _LANGCHAIN.replace("seed=3", "use_responses_api=True")
    + """
print(model.with_structured_output(Add).invoke("hi").model_dump_json())
held = model.bind_tools([Add], tool_choice="any", parallel_tool_calls=False)
print(json.dumps(held.invoke("hi").tool_calls[0]["args"]))
""",
    "openai, responses": _RESPONSES
    + """
print(client.responses.create(**asked).output[0].arguments)
with client.responses.stream(**asked) as stream:
    print(next(event.arguments for event in stream if event.type == "response.function_call_arguments.done"))
""",
    "litellm": _LITELLM
    + """
print(litellm.completion(**asked).choices[0].message.tool_calls[0].function.arguments)
chunks = list(litellm.completion(**asked, stream=True))
print(litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function.arguments)
""",
    "pydantic-ai": _AGENT,
    "vercel": _VERCEL
    + """
console.log(JSON.stringify((await generateText(asked)).toolCalls[0].input));
const calls = [];
for await (const part of streamText(asked).fullStream) if (part.type === "tool-call") calls.push(part);
console.log(JSON.stringify(calls[0].input));
""",
}  # fmt: skip
