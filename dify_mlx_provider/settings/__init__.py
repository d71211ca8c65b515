"""What a person sets in Dify, and what Dify shows for it: forms, a model's schema, its parameters."""
