"""What Sordino claims of itself."""
