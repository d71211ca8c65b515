"""The model classes that Dify's SDK loads; they only delegate."""
