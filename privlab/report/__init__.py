"""Makes tables, figures and the page from records."""
