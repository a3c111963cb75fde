"""Launchers, the rendezvous of ranks, and notices from ranks to the launcher."""
