"""What people touch: CLI, HTTP, ZeroMQ client SDK, the offline LLM class."""
