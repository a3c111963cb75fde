"""The command `sordino` with its subcommands. Only this package prints; the library never does."""
