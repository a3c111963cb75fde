"""Checkpoints that are complete or do not exist: single files (`save`, `load`), or a folder of them (`Folder`)."""

from sordino.checkpoint.files import decode, load, read, save
from sordino.checkpoint.folder import Folder, Saved
from sordino.checkpoint.pieces import Piece, share
from sordino.files import atomic_file

__all__ = ["Folder", "Piece", "Saved", "atomic_file", "decode", "load", "read", "save", "share"]
