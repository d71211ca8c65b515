"""Making the plugin's package. Build time only: nothing here is in the package, and nothing in it imports this."""
