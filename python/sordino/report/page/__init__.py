"""Page that shows runs: one self-contained HTML file, made from their records (`sordino.record`).

Python collects the records (`contents`), JavaScript in `assets/` draws them, and nothing is fetched from anywhere.
"""
