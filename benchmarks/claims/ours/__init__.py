"""Sordino's own claims."""
