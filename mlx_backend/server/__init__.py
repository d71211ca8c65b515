"""HTTP: werkzeug turns requests into service calls and events into OpenAI objects."""
