"""The command `sordino`: run, doctor, bench. Only this package prints; the library never does."""
