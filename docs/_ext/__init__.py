"""Extensions that build parts of the site from the code; `docs/conf.py` lists the modules."""
