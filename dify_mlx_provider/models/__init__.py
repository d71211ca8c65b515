"""The leaves that Dify's SDK loads; they only delegate."""
