"""Other libraries as contenders, where they are installed."""
