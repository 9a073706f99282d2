"""sparsedp."""
