"""Figures, pages and tables, each made from records."""
