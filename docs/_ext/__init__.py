"""What the site makes of the code: `docs/conf.py` lists the modules."""
