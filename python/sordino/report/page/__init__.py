"""The page that shows runs: one HTML file with all that it needs in it, made of their records (`sordino.record`).

Python takes the records together (`contents`), JavaScript in `assets/` draws, and nothing is fetched from anywhere.
"""
