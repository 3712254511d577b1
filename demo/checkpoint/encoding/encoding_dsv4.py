"""The demo checkpoint's own sentences for the chat format, under the constant names that V4 encoders use."""

TOOLS_TEMPLATE = """## Tools

You can call these tools:

{tool_schemas}

To call a tool, write:

<{dsml_token}tool_calls>
<{dsml_token}invoke name="NAME">
<{dsml_token}parameter name="KEY" string="true|false">VALUE</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}tool_calls>

In thinking mode think between {thinking_start_token} and {thinking_end_token} first."""

response_format_template = """## Response Format:

Answer with JSON that follows this schema:
{schema}"""

REASONING_EFFORT_PROMPTS = {
    "low": "",
    "high": "Think carefully.\n\n",
    "max": "Think as carefully as you can, and check your answer.\n\n",
}
DEFAULT_REASONING_EFFORT = "low"
