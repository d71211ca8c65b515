"""Settings in Dify: forms and their validation, a model's schema, its parameters."""
