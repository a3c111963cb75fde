"""Parts of examples/train.py and examples/language.py."""
