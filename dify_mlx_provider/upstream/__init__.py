"""Any server that speaks OpenAI's protocol: the form, HTTP, streams, errors. Knows no kinds of servers and no chats."""
