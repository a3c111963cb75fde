"""State of running ranks, for `sordino inspect` and for Prometheus.

A rank listens on a Unix socket in the abstract namespace, whose name contains its process id. So a reader finds all
ranks of this machine in /proc/net/unix, no file is left behind, and no launcher is needed. A rank that cannot answer is
described from outside, by /proc.
"""
