"""OpenAI bodies to requests, and outputs back to OpenAI bodies: completions and chat."""
