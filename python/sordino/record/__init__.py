"""What a run leaves of itself: lines of JSON, in one file a rank and one for the job, there as soon as it has happened.

`docs/report.md` lists the kinds of lines. Training, `sordino simulate` and `sordino plan` write the same; `reading`
takes them up again, also while they grow and after a rank was killed in the middle of a line.
"""

FORMAT = 1
"""Of what is written. A reader takes what is as old or older."""
JOB = "job.jsonl"
RANK = "rank-{:05d}.jsonl"
