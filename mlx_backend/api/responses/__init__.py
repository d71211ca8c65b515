"""OpenAI's Responses API: POST /v1/responses and the addresses of what it stores."""
