"""Run record: JSON lines, in one file per rank and one for the job. Every line is in its file when `write` returns.

  job.jsonl           job            once: format, version, what ("training", "simulation" or "plan")
                      start, end     at each start of the job, and its end
                      result         of a plan
  rank-00003.jsonl    rank           at each start of the rank, before its other lines
                      step, spans, ages, ..., then "end" or "error" as the last line of a rank that was not killed

`docs/report.md` lists the kinds of lines. Training, `sordino simulate` and `sordino plan` write this format. `reading`
reads it, also while the files grow and after a rank was killed in the middle of a line.
"""

FORMAT = 1
"""Version of the format. A reader accepts this and older versions."""
JOB = "job.jsonl"
RANK = "rank-{:05d}.jsonl"
